# Trains a stack of trials on splits held in memory and says how each ended.
from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.stopping import Standing, Stop, stopped
from affine_divergence.lab.training import _conv_stack, _stack
from affine_divergence.lab.training._conv_stack import ConvStack
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.training._stack import Stack
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Part, Splits

CHANCE_MARGIN = 1.09  # accuracy up to 1.09/classes counts as chance: 10.9 % for ten classes


def train(
    trials: Sequence[Trial],
    splits: Splits,
    device: str = "cpu",
    *,
    together: int | None = None,
    report: Callable[[float], None] = lambda _: None,
) -> list[Outcome]:
    """Train trials that can be trained together (`Trial.shared`); outcomes in the trials' order.

    The curves hold a value an epoch and one at the last step: the training loss averaged over the steps since the value
    before, and the validation accuracy.

    More than `together` trials are trained as several stacks, an epoch of each in turn, so that a stop rule can compare all of them.
    `report` is called with the share of the work that is done, after every step.
    """
    clock = _Clock()
    first = trials[0]
    splits = splits.by_pixel if first.standardise == "pixel" else splits
    for other in trials:
        if other.shared != first.shared:
            raise ValueError(f"a stack's trials share all but learning rate, seed, start and perhaps method; got {first!r} and {other!r}")
    order = sorted(range(len(trials)), key=lambda i: _conv_stack.sort_key(trials[i]) if first.pattern else _stack.sort_key(trials[i]))
    inputs, labels = (part[: first.train_images].to(device) for part in (splits.train.inputs, splits.train.labels))
    if first.train_images is not None and len(inputs) < first.train_images:
        raise ValueError(f"train_images = {first.train_images}, but the training part of {splits.name} has {len(inputs)} images")
    count = math.ceil(len(order) / (together or len(order)))
    parts = []
    for number in range(count):
        members = order[len(order) * number // count : len(order) * (number + 1) // count]
        parts.append(_Part(make_stack([trials[i] for i in members], splits.shape, splits.classes, inputs), members))
    sizes = {member: len(part.members) for part in parts for member in part.members}
    runs = [_Run(sizes[i]) for i in range(len(trials))]
    _spend(runs, clock.lap())
    steps, per_epoch = steps_of(first, len(inputs)), steps_per_epoch(first, len(inputs))
    done, work = 0, steps * len(trials)

    def counted(batches: Iterable[Tensor], weight: int) -> Iterator[Tensor]:
        nonlocal done
        for batch in batches:
            yield batch
            done += weight
            report(done / work)

    for epoch in range(math.ceil(steps / per_epoch)):
        begin, end = epoch * per_epoch, min((epoch + 1) * per_epoch, steps)
        paces = [1.0 - step / steps if first.schedule == "linear" else 1.0 for step in range(begin, end)]
        for part in parts:
            batches = _minibatches(first, part.stack.seeds, len(inputs), epoch, end - begin)
            losses = descend(part.stack, inputs, labels, counted(batches, part.stack.count), paces).tolist()
            accuracies = _accuracy(part.stack, splits.validation, device).tolist()
            for member, loss, accuracy in zip(part.members, losses, accuracies, strict=True):
                runs[member].losses.append(loss)
                runs[member].accuracies.append(accuracy)
            _spend([runs[member] for member in part.members], clock.lap())
        if first.stop is not None and end < steps:
            halted = _halted(first.stop, end / steps, [i for part in parts for i in part.members], trials, runs)
            for part in parts:
                part.drop(halted)
            parts = [part for part in parts if part.members]
            for i, reason in halted.items():
                runs[i].stopped = f"stopped after {100 * end / steps:.0f} % of its steps: {reason}"
            done += len(halted) * (steps - end)
            if not parts:
                break
    for part in parts if first.role == "evaluation" else []:
        for member, accuracy in zip(part.members, _accuracy(part.stack, splits.test, device).tolist(), strict=True):
            runs[member].test = accuracy
    _spend(runs, clock.lap())
    return [run.outcome(splits.classes) for run in runs]


class _Clock:
    # Wall and CPU seconds since the lap before.
    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        wall, cpu = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        return wall, cpu


@dataclass
class _Part:
    # A stack with the places of its trials among all that are trained.
    stack: Stack | ConvStack
    members: list[int]

    def drop(self, places: Container[int]) -> None:
        kept = [replica for replica, member in enumerate(self.members) if member not in places]
        if len(kept) == len(self.members):
            return
        self.members = [self.members[replica] for replica in kept]
        if kept:
            self.stack.keep(kept)


@dataclass
class _Run:
    # What a trial has come to.
    size: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    test: float | None = None
    stopped: str | None = None

    def outcome(self, classes: int) -> Outcome:
        diverged = not math.isfinite(self.losses[-1]) or self.accuracies[-1] <= CHANCE_MARGIN / classes
        chance = 1.0 / classes
        return Outcome(
            status="diverged" if diverged else "done",
            validation_accuracy=chance if diverged else self.accuracies[-1],
            test_accuracy=None if self.test is None else chance if diverged else self.test,
            final_loss=self.losses[-1],
            loss_curve=self.losses,
            accuracy_curve=self.accuracies,
            wall_seconds=self.wall,
            cpu_seconds=self.cpu,
            stack_size=self.size,
            reason=self.stopped,
            stopped_epoch=None if self.stopped is None else len(self.losses),
        )


def _spend(runs: Sequence[_Run], lap: tuple[float, float]) -> None:
    for run in runs:
        run.wall += lap[0] / len(runs)
        run.cpu += lap[1] / len(runs)


def _halted(stop: Stop, share: float, members: Sequence[int], trials: Sequence[Trial], runs: Sequence[_Run]) -> dict[int, str]:
    standings = [Standing((trials[i].cell, trials[i].seed), runs[i].accuracies[-1], runs[i].losses[-1]) for i in members]
    return {members[place]: reason for place, reason in stopped(stop, share, standings).items()}


def make_stack(trials: Sequence[Trial], shape: tuple[int, int, int], classes: int, like: Tensor) -> Stack | ConvStack:
    """The nets of trials in their order, for images (C, H, W), on the device and in the dtype of a tensor."""
    if trials[0].pattern:
        return ConvStack(trials, shape, classes, like)
    return Stack(trials, shape, classes, like)


def descend(
    stack: Stack | ConvStack, inputs: Tensor, labels: Tensor, batches: Iterable[Tensor], paces: Iterable[float] | None = None
) -> Tensor:
    """A step for each minibatch, (seeds, B) rows of the inputs; the training losses (K,) averaged over them.

    `paces` are what multiplies the learning rates, step by step: 1 where there are none.
    """
    total, count = inputs.new_zeros(stack.count, dtype=torch.float64), 0
    for batch, pace in zip(batches, itertools.repeat(1.0) if paces is None else paces, strict=False):
        rows = batch.to(inputs.device)
        total += stack.step([inputs.index_select(0, of_seed) for of_seed in rows], labels[rows], pace) * rows.shape[1]
        count += rows.shape[1]
    return total / count


def steps_of(trial: Trial, count: int) -> int:
    """The steps of a trial on so many training images."""
    return trial.steps if trial.steps is not None else (trial.epochs or 0) * steps_per_epoch(trial, count)


def steps_per_epoch(trial: Trial, count: int) -> int:
    """The minibatches of an epoch of so many training images; ValueError where there is none."""
    steps = count // trial.batch_size if trial.drop_last else math.ceil(count / trial.batch_size)
    if not steps:
        raise ValueError(f"batch_size = {trial.batch_size} and drop_last leave no minibatch of {count} training images")
    return steps


def _minibatches(trial: Trial, seeds: Sequence[int], count: int, epoch: int, steps: int) -> Iterator[Tensor]:
    # The first minibatches of an epoch, (seeds, B) rows of images.
    order = torch.stack([image_order(seed, epoch, count) for seed in seeds])
    return itertools.islice(iter(order.split(trial.batch_size, dim=1)), steps)


def _accuracy(stack: Stack | ConvStack, part: Part, device: str) -> Tensor:
    right = sum(
        (stack.predict(rows.to(device)).argmax(-1) == labels.to(device)).sum(-1)
        for rows, labels in zip(part.inputs.split(stack.rows), part.labels.split(stack.rows), strict=True)
    )
    assert isinstance(right, Tensor)
    return right.double() / len(part.labels)
