# Small trials, grids and records for the tests of the lab.
from __future__ import annotations

from typing import Any

from affine_divergence.lab.grid import Grid, parse_grid
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Trial

TINY = """
study = "tiny"
data = "digits"
[grid]
method = ["none", "affine-like"]
width = [8]
depth = [2]
activation = ["tanh"]
batch_size = [32]
learning_rate = [0.03, 0.3]
seed = [0, 1, 2]
epochs = 2
"""

TUNED = """
study = "tuned"
data = "digits"
[grid]
method = ["none", "affine-like"]
width = 8
depth = 1
activation = "tanh"
batch_size = 64
learning_rate = [0.01, 0.03, 0.1, 0.3, 1.0]
seed = [0, 1]
epochs = 1
[tuning]
seeds = [10, 11, 12]
"""

# For runs as processes: stacks of a fifth of a second or so, that a kill may meet.
STUDY = """
study = "faults"
data = "digits"
[grid]
method = ["none", "affine-like"]
width = [4, 5, 6]
depth = 1
activation = "tanh"
batch_size = 64
learning_rate = [0.1, 0.3, 1.0]
seed = [0, 1]
epochs = 8
[tuning]
seeds = [10, 11]
"""

PROVENANCE: dict[str, str | int] = {
    "source_digest": "s",
    "data_digest": "d",
    "device": "cpu",
    "processor": "p",
    "threads": 1,
    "python": "3",
    "torch": "2",
}


def grid(text: str = TINY) -> Grid:
    return parse_grid(text, "grid.toml")


def trial(**fields: Any) -> Trial:
    defaults: dict[str, Any] = {
        "data": "digits",
        "method": "none",
        "width": 8,
        "depth": 2,
        "activation": "tanh",
        "batch_size": 32,
        "learning_rate": 0.1,
        "seed": 0,
        "epochs": 2,
    }
    return Trial(**(defaults | fields))


def record(one: Trial, accuracy: float = 0.5, **outcome: Any) -> Record:
    test = None if one.role == "tuning" else accuracy
    values: dict[str, Any] = {
        "status": "done",
        "validation_accuracy": accuracy,
        "test_accuracy": test,
        "final_loss": 1.0,
        "loss_curve": [2.0, 1.0],
        "accuracy_curve": [0.3, accuracy],
        "wall_seconds": 1.0,
        "cpu_seconds": 1.0,
        "stack_size": 1,
    }
    return Record(one, Outcome(**(values | outcome)), PROVENANCE)
