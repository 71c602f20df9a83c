# Tasks for worker processes that tests look into: a function must be importable there.
from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace

import torch
from makers import trial

from affine_divergence.lab import worker
from affine_divergence.lab.data import Part
from affine_divergence.lab.training import train


def state() -> tuple[int, int, bool]:
    """The process, its threads, and whether a denormal is zero in it."""
    return os.getpid(), torch.get_num_threads(), (torch.tensor([1e-40]) * 1.0).item() == 0.0


def reporting() -> list[float]:
    """Report a share of the work twice, and answer when the parent has had time to read it."""
    assert worker._connection is not None
    for share in (0.25, 0.5):
        worker._connection.send(worker.Progress(share, 1.0))
    time.sleep(0.3)
    return [0.25, 0.5]


def slowdown(rounds: int) -> float:
    """How many times longer deep narrow Tanh nets take whose activations and changes are denormals, of nets of the usual range."""
    splits = worker._splits
    assert splits is not None
    tiny = replace(splits, train=Part(splits.train.inputs * 2e-38, splits.train.labels))
    shape = {"method": "affine-like", "width": 1, "depth": 8, "batch_size": 1000, "epochs": None, "steps": 12, "role": "tuning"}
    usual = [trial(**shape, learning_rate=1e-3 * (i + 1)) for i in range(48)]
    small = [trial(**shape, learning_rate=1e-39 * (i + 1)) for i in range(48)]
    times: dict[str, list[float]] = {"usual": [], "small": []}
    for _ in range(rounds):
        for name, trials, images in (("usual", usual, splits), ("small", small, tiny)):
            start = time.process_time()
            train(trials, images)
            times[name].append(time.process_time() - start)
    return statistics.median(times["small"]) / statistics.median(times["usual"])
