# Which trials are trained together: stacks, their cost, and how one that is too large is cut.
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from affine_divergence.lab.trial import Method, Trial

MAX_STACK = 96
MAX_COLUMNS = 2560  # of the first layers together: 31 MB of weights on CIFAR-10, read and written at every step
IMAGES = 45_000  # in an epoch, to compare budgets in epochs with budgets in steps

Stack = tuple[Trial, ...]


class Shape(NamedTuple):
    """What the time of a convolutional net's step depends on, but for its images and its activation."""

    method: Method
    width: int
    depth: int
    pattern: str
    batch_size: int


def shape_of(trial: Trial) -> Shape | None:
    """The shape of a convolutional net; None for others."""
    return Shape(trial.method, trial.width, trial.depth, trial.pattern, trial.batch_size) if trial.pattern else None


def stacks(trials: Sequence[Trial], sizes: Mapping[Shape, int] | None = None) -> list[Stack]:
    """Trials that can be trained together, in parts of a fitting size, in the order in which they are to be trained.

    Fully-connected nets always gain by that. Convolutional ones are trained alone, but for shapes of which `sizes` says how many.
    """
    groups: dict[object, list[Trial]] = defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.seed):  # those of one seed share their minibatches
        groups[trial.shared].append(trial)
    parts: list[Stack] = []
    for group in groups.values():
        count = -(-len(group) // _most(group[0], sizes or {}))
        bounds = [len(group) * i // count for i in range(count + 1)]
        parts.extend(tuple(group[start:end]) for start, end in itertools.pairwise(bounds))
    return sorted(parts, key=turn)


def _most(trial: Trial, sizes: Mapping[Shape, int]) -> int:
    shape = shape_of(trial)
    return sizes.get(shape, 1) if shape else max(1, min(MAX_STACK, MAX_COLUMNS // trial.width))


def turn(stack: Stack) -> tuple[int, float]:
    """What stacks are ordered by: low seeds first, so that an unfinished study has some seeds of every cell; then the dearest, roughly,
    since a long one begun last would keep every other worker waiting.
    """
    first = stack[0]
    rows = first.steps * first.batch_size if first.steps else (first.epochs or 1) * (first.train_images or IMAGES)
    return min(trial.seed for trial in stack), -float(len(stack) * first.width * first.depth * rows)


def halves(stack: Stack) -> tuple[Stack, Stack]:
    """A stack of two trials or more, cut in two."""
    middle = len(stack) // 2
    return stack[:middle], stack[middle:]
