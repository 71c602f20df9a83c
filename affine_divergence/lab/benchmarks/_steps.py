# How long a step of a trial takes, alone and in a stack, on the images that it would be trained on.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.training._train import descend, make_stack
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Splits

ROUNDS = 9


def step_seconds(trials: Sequence[Trial], splits: Splits, device: str = "cpu") -> tuple[float | None, float | None]:
    """Median CPU seconds of a step of one trial: of the first alone, and of all together; None for what cannot be trained."""
    pieces: dict[str, Callable[[], object]] = {}
    for name, chosen in (("alone", trials[:1]), ("together", trials)):
        try:
            step = _step(chosen, splits, device)
            step()
        except Exception:  # whatever it is: where it also ends a trial, the trial's record says so
            continue
        pieces[name] = step
    seconds = interleaved(pieces, ROUNDS)
    return seconds.get("alone"), seconds["together"] / len(trials) if "together" in seconds else None


def _step(trials: Sequence[Trial], splits: Splits, device: str) -> Callable[[], object]:
    inputs, labels = (part[: trials[0].batch_size].to(device) for part in (splits.train.inputs, splits.train.labels))
    stack = make_stack(trials, splits.shape, splits.classes, inputs)
    rows = torch.arange(len(inputs)).expand(len(stack.seeds), -1)
    return lambda: descend(stack, inputs, labels, [rows])
