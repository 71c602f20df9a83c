# How a trial ended.
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """A trial's result. A diverged one is scored as chance, its curves are as they were; a failed one has a reason and no scores.

    A trial that was stopped early has the number of epochs that it was trained for, `stopped_epoch`, and a reason. Its scores are those
    after that epoch, and its curves end there.
    """

    status: Status
    validation_accuracy: float | None = None
    test_accuracy: float | None = None
    final_loss: float | None = None
    loss_curve: list[float] = field(default_factory=list)
    accuracy_curve: list[float] = field(default_factory=list)
    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    stack_size: int | None = None
    reason: str | None = None
    stopped_epoch: int | None = None
