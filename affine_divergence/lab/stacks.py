# Which trials are trained together: stacks, their cost, and how one that is too large is cut.
from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from affine_divergence.lab.costs import nominal_seconds
from affine_divergence.lab.trial import GRADIENT_ONLY, Method, Optimizer, Trial

MAX_STACK = 96
MAX_COLUMNS = 2560  # of the first layers together: 31 MB of weights on CIFAR-10, read and written at every step
MAX_SECONDS = 120.0  # estimated CPU time of a stack: what an interruption loses at most of each worker

Stack = tuple[Trial, ...]


class Shape(NamedTuple):
    """What the time of a step depends on, but for its images and its activation.

    In fully-connected nets the pattern is empty, and the method is none for all that take the same time.
    """

    method: Method
    width: int
    depth: int
    pattern: str
    batch_size: int
    optimizer: Optimizer = "sgd"


def shape_of(trial: Trial) -> Shape:
    """The shape of a trial's net."""
    method = trial.method if trial.pattern or trial.method in GRADIENT_ONLY else "none"
    return Shape(method, trial.width, trial.depth, trial.pattern or "", trial.batch_size, trial.optimizer)


def stacks(
    trials: Sequence[Trial], sizes: Mapping[Shape, int] | None = None, seconds: Callable[[Trial], float] = nominal_seconds
) -> list[Stack]:
    """Trials that can be trained together, in parts of a fitting size, in the order in which they are to be trained.

    Fully-connected nets always gain by that. Convolutional ones are trained alone, but for shapes of which `sizes` says how many.
    A part takes `MAX_SECONDS` of CPU time at most, by the estimate `seconds`. Trials with a stop rule stay together with those of the
    same cell and seed, which they are compared with, even if that takes longer.
    """
    groups: dict[object, list[Trial]] = defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.seed):  # those of one seed share their minibatches
        groups[trial.shared].append(trial)
    parts = [part for group in groups.values() for part in _parts(_units(group), together(group[0], sizes or {}), seconds)]
    return sorted(parts, key=turn)


def together(trial: Trial, sizes: Mapping[Shape, int]) -> int:
    """How many trials like this one make one batched model at most."""
    return sizes.get(shape_of(trial), 1) if trial.pattern else max(1, min(MAX_STACK, MAX_COLUMNS // trial.width))


def turn(stack: Stack) -> tuple[int, float]:
    """What stacks are ordered by: low seeds first, so that an unfinished study has some seeds of every cell; then the dearest, roughly,
    since a long one begun last would keep every other worker waiting.
    """
    return min(trial.seed for trial in stack), -sum(map(nominal_seconds, stack))


def _units(group: list[Trial]) -> list[Stack]:
    # What must not be cut.
    if group[0].stop is None:
        return [(trial,) for trial in group]
    units: dict[object, list[Trial]] = defaultdict(list)
    for trial in group:
        units[trial.cell, trial.seed].append(trial)
    return [tuple(unit) for unit in units.values()]


def _parts(units: Sequence[Stack], most: int, seconds: Callable[[Trial], float]) -> list[Stack]:
    costs = [sum(map(seconds, unit)) for unit in units]
    count = max(math.ceil(sum(map(len, units)) / most), math.ceil(sum(costs) / MAX_SECONDS), 1)
    while True:
        runs = _cut(costs, min(count, len(units)))
        parts = [tuple(itertools.chain.from_iterable(units[run.start : run.stop])) for run in runs]
        fits = all(len(part) <= most and sum(costs[run.start : run.stop]) <= MAX_SECONDS for part, run in zip(parts, runs, strict=True))
        if fits or count >= len(units):
            return parts
        count += 1


def _cut(costs: Sequence[float], count: int) -> list[range]:
    # Cut into so many runs of about the same cost, none of them empty.
    if count == len(costs):
        return [range(i, i + 1) for i in range(count)]
    reached = list(itertools.accumulate(costs))
    middles = [end - cost / 2 for end, cost in zip(reached, costs, strict=True)]
    of = [min(count - 1, int(count * middle / reached[-1])) for middle in middles]
    groups = [list(members) for _, members in itertools.groupby(range(len(costs)), key=of.__getitem__)]
    return [range(members[0], members[-1] + 1) for members in groups]


def halves(stack: Stack) -> tuple[Stack, Stack]:
    """A stack of two trials or more, cut in two."""
    middle = len(stack) // 2
    return stack[:middle], stack[middle:]
