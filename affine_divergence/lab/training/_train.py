# Trains a stack of trials on splits held in memory and says how each ended.
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.training._stack import Stack
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Part, Splits

CHUNK = 1000  # rows evaluated at once
CHANCE_MARGIN = 1.09  # accuracy up to 1.09/classes counts as chance: 10.9 % for ten classes


def train(trials: Sequence[Trial], splits: Splits) -> list[Outcome]:
    """Train trials that share all but method and learning rate; outcomes in the trials' order.

    The curves hold a value an epoch and one at the last step: the training loss averaged over the steps since the value
    before, and the validation accuracy.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    order = sorted(range(len(trials)), key=lambda i: (trials[i].method, trials[i].learning_rate))
    ordered = [trials[i] for i in order]
    first = ordered[0]
    for other in ordered:
        if other.shared != first.shared:
            raise ValueError(f"the trials of a stack share all but method and learning rate; got {first!r} and {other!r}")
    inputs, labels = splits.train.inputs, splits.train.labels
    stack = Stack(ordered, inputs.shape[1], splits.classes, inputs.dtype)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    for batches in _epochs(first, len(inputs)):
        total, rows = torch.zeros(len(ordered), dtype=torch.float64), 0
        for batch in batches:
            total += stack.step(inputs[batch], labels[batch]) * len(batch)
            rows += len(batch)
        losses.append(total / rows)
        accuracies.append(_accuracy(stack, splits.validation))
    test = _accuracy(stack, splits.test) if first.role == "evaluation" else None
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    loss_curves, accuracy_curves = torch.stack(losses, 1).tolist(), torch.stack(accuracies, 1).tolist()
    outcomes = {
        index: _outcome(
            loss_curves[place],
            accuracy_curves[place],
            None if test is None else float(test[place]),
            splits.classes,
            wall / len(trials),
            cpu / len(trials),
            len(trials),
        )
        for place, index in enumerate(order)
    }
    return [outcomes[index] for index in range(len(trials))]


def _epochs(trial: Trial, count: int) -> Iterator[Iterator[Tensor]]:
    # The minibatches of each epoch; a budget in steps may end within one.
    per_epoch = math.ceil(count / trial.batch_size)
    steps = trial.steps if trial.steps is not None else (trial.epochs or 0) * per_epoch
    for epoch in range(math.ceil(steps / per_epoch)):
        order = image_order(trial.seed, epoch, count)
        yield itertools.islice(iter(order.split(trial.batch_size)), steps - epoch * per_epoch)


def _accuracy(stack: Stack, part: Part) -> Tensor:
    right = sum(
        (stack.predict(rows).argmax(-1) == labels).sum(-1)
        for rows, labels in zip(part.inputs.split(CHUNK), part.labels.split(CHUNK), strict=True)
    )
    assert isinstance(right, Tensor)
    return right.double() / len(part.labels)


def _outcome(
    losses: list[float],
    accuracies: list[float],
    test: float | None,
    classes: int,
    wall: float,
    cpu: float,
    size: int,
) -> Outcome:
    diverged = not math.isfinite(losses[-1]) or accuracies[-1] <= CHANCE_MARGIN / classes
    chance = 1.0 / classes
    return Outcome(
        status="diverged" if diverged else "done",
        validation_accuracy=chance if diverged else accuracies[-1],
        test_accuracy=None if test is None else chance if diverged else test,
        final_loss=losses[-1],
        loss_curve=losses,
        accuracy_curve=accuracies,
        wall_seconds=wall,
        cpu_seconds=cpu,
        stack_size=size,
    )
