# Trains a stack of trials on splits held in memory and says how each ended.
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.training import _conv_stack, _stack
from affine_divergence.lab.training._conv_stack import ConvStack
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.training._stack import Stack
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Part, Splits

CHANCE_MARGIN = 1.09  # accuracy up to 1.09/classes counts as chance: 10.9 % for ten classes


def train(trials: Sequence[Trial], splits: Splits, device: str = "cpu") -> list[Outcome]:
    """Train trials that can be trained together (`Trial.shared`); outcomes in the trials' order.

    The curves hold a value an epoch and one at the last step: the training loss averaged over the steps since the value
    before, and the validation accuracy.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    first = trials[0]
    for other in trials:
        if other.shared != first.shared:
            raise ValueError(f"the trials of a stack share all but learning rate, seed and perhaps method; got {first!r} and {other!r}")
    order = sorted(range(len(trials)), key=lambda i: _conv_stack.sort_key(trials[i]) if first.pattern else _stack.sort_key(trials[i]))
    inputs, labels = (part[: first.train_images].to(device) for part in (splits.train.inputs, splits.train.labels))
    if first.train_images is not None and len(inputs) < first.train_images:
        raise ValueError(f"train_images = {first.train_images}, but the training part of {splits.name} has {len(inputs)} images")
    stack = make_stack([trials[i] for i in order], splits.shape, splits.classes, inputs)
    losses: list[Tensor] = []
    accuracies: list[Tensor] = []
    for batches in _epochs(first, stack.seeds, len(inputs)):
        losses.append(descend(stack, inputs, labels, batches))
        accuracies.append(_accuracy(stack, splits.validation, device))
    test = _accuracy(stack, splits.test, device) if first.role == "evaluation" else None
    loss_curves, accuracy_curves = torch.stack(losses, 1).tolist(), torch.stack(accuracies, 1).tolist()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
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


def make_stack(trials: Sequence[Trial], shape: tuple[int, int, int], classes: int, like: Tensor) -> Stack | ConvStack:
    """The nets of trials in their order, for images (C, H, W), on the device and in the dtype of a tensor."""
    if trials[0].pattern:
        return ConvStack(trials, shape, classes, like)
    return Stack(trials, math.prod(shape), classes, like)


def descend(stack: Stack | ConvStack, inputs: Tensor, labels: Tensor, batches: Iterable[Tensor]) -> Tensor:
    """A step for each minibatch, (seeds, B) rows of the inputs; the training losses (K,) averaged over them."""
    total, count = inputs.new_zeros(stack.count, dtype=torch.float64), 0
    for batch in batches:
        rows = batch.to(inputs.device)
        total += stack.step([inputs.index_select(0, of_seed) for of_seed in rows], labels[rows]) * rows.shape[1]
        count += rows.shape[1]
    return total / count


def _epochs(trial: Trial, seeds: Sequence[int], count: int) -> Iterator[Iterator[Tensor]]:
    # The minibatches of each epoch, (seeds, B) rows of images; a budget in steps may end within one.
    per_epoch = math.ceil(count / trial.batch_size)
    steps = trial.steps if trial.steps is not None else (trial.epochs or 0) * per_epoch
    for epoch in range(math.ceil(steps / per_epoch)):
        order = torch.stack([image_order(seed, epoch, count) for seed in seeds])
        yield itertools.islice(iter(order.split(trial.batch_size, dim=1)), steps - epoch * per_epoch)


def _accuracy(stack: Stack | ConvStack, part: Part, device: str) -> Tensor:
    right = sum(
        (stack.predict(rows.to(device)).argmax(-1) == labels.to(device)).sum(-1)
        for rows, labels in zip(part.inputs.split(stack.rows), part.labels.split(stack.rows), strict=True)
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
