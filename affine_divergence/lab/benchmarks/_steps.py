# How long a step of a trial takes, alone and in a stack, and its evaluation, on the images that it would be trained on.
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.training._train import descend, make_stack
from affine_divergence.lab.trial import FOOF_REFRESH, Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Splits

ROUNDS = 9
EVALUATED = 200  # images


def step_seconds(trials: Sequence[Trial], splits: Splits, device: str = "cpu") -> tuple[float | None, float | None, float | None]:
    """Median CPU seconds of one trial: of a step of the first alone, of a step all together, and of the evaluation of one image.

    None for what cannot be trained.
    """
    pieces: dict[str, Callable[[], object]] = {}
    firsts: dict[str, float] = {}
    evaluate: Callable[[], object] | None = None
    for name, chosen in (("alone", trials[:1]), ("together", trials)):
        try:
            step, evaluate_now = _step(chosen, splits, device)
            before = time.process_time()
            step()
            firsts[name] = time.process_time() - before
        except Exception:  # whatever it is: where it also ends a trial, the trial's record says so
            continue
        pieces[name], evaluate = step, evaluate_now
    seconds = interleaved({**pieces, **({"evaluation": evaluate} if evaluate else {})}, ROUNDS)
    if trials[0].method == "foof":  # whose first step is one of those that invert
        seconds |= {name: seconds[name] + max(0.0, firsts[name] - seconds[name]) / FOOF_REFRESH for name in pieces}
    counts = {"alone": 1, "together": len(trials)}
    rows = min(EVALUATED, len(splits.validation.inputs))
    last = counts[list(pieces)[-1]] if pieces else 1
    return (
        seconds.get("alone"),
        seconds["together"] / counts["together"] if "together" in seconds else None,
        seconds["evaluation"] / (rows * last) if "evaluation" in seconds else None,
    )


def _step(trials: Sequence[Trial], splits: Splits, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    inputs, labels = (part[: trials[0].batch_size].to(device) for part in (splits.train.inputs, splits.train.labels))
    stack = make_stack(trials, splits.shape, splits.classes, inputs)
    rows = torch.arange(len(inputs)).expand(len(stack.seeds), -1)
    images = splits.validation.inputs[:EVALUATED].to(device)
    return lambda: descend(stack, inputs, labels, [rows]), lambda: [stack.predict(some) for some in images.split(stack.rows)]
