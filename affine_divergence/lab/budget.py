# What a study costs: the CPU time of its blocks, and which of its trials would end within some hours, in the order in which they run.
from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from affine_divergence.lab.grid import Axes, Grid
from affine_divergence.lab.stacks import Shape, stacks
from affine_divergence.lab.stages import middling
from affine_divergence.lab.trial import DAMPED, Cell, Trial
from affine_divergence.lab.tuning import Choice, plan


@dataclass(frozen=True)
class Course:
    """The trials that a study is expected to ask for, stage by stage, where no range of rates needs to be extended."""

    grid: Grid
    stages: tuple[tuple[Trial, ...], ...]
    choices: Mapping[Cell, Choice]


@dataclass(frozen=True)
class Cost:
    """Cells, trials and CPU seconds of a block; a trial that several blocks hold is counted in the first of them."""

    cells: int
    tuning: int
    tuning_seconds: float
    evaluation: int
    evaluation_seconds: float

    @property
    def seconds(self) -> float:
        return self.tuning_seconds + self.evaluation_seconds


def expected(grid: Grid, accuracies: Mapping[Trial, float]) -> Course:
    """The expected course of a study. What `accuracies` holds is finished: it tells the course, and is not part of its stages."""
    guess, told = _guess(grid), dict[Trial, float]()
    found: list[tuple[Trial, ...]] = []
    while stage := plan(grid, told).missing:
        found.append(tuple(trial for trial in stage if trial not in accuracies))
        told.update((trial, accuracies[trial] if trial in accuracies else guess(trial)) for trial in stage)
    return Course(grid, tuple(stage for stage in found if stage), plan(grid, told).choices)


def costs(course: Course, seconds: Callable[[Trial], float]) -> list[Cost]:
    """The cost of each block of the grid."""
    left = {trial for stage in course.stages for trial in stage}
    tuning: dict[Cell, list[Trial]] = {}
    for trial in left:
        if trial.role == "tuning":
            tuning.setdefault(trial.cell, []).append(trial)
    found = []
    for block in course.grid.grid:
        cells = dict.fromkeys(block.cells(course.grid.data, course.grid.train_images, course.grid.drop_last))
        tuned = [trial for cell in cells if block.learning_rate for trial in tuning.pop(cell, ())]
        tested = left & set(_tested(block, list(cells), course.choices))
        left -= tested
        found.append(Cost(len(cells), len(tuned), sum(map(seconds, tuned)), len(tested), sum(map(seconds, tested))))
    return found


def endings(
    course: Course, seconds: Callable[[Trial], float], sizes: Mapping[Shape, int], workers: int
) -> dict[Trial, float]:
    """When each trial would end, in seconds from the start, on so many workers with a core each."""
    ends: dict[Trial, float] = {}
    now = 0.0
    for stage in course.stages:
        free = [now] * workers
        for stack in stacks(stage, sizes, seconds):
            end = heapq.heappop(free) + sum(map(seconds, stack))
            heapq.heappush(free, end)
            ends.update(dict.fromkeys(stack, end))
        now = max(free)
    return ends


def left_out(course: Course, ended: Callable[[Trial], bool]) -> dict[tuple[Cell, tuple[int, ...]], list[str]]:
    """What of the evaluation would not have ended: the names of the methods by setting (`Cell.bare`) and seeds."""
    seeds: dict[Cell, dict[int, None]] = {}
    for trial in itertools.chain.from_iterable(course.stages):
        if trial.role == "evaluation" and not ended(trial):
            seeds.setdefault(trial.cell, {})[trial.seed] = None
    methods: dict[tuple[Cell, tuple[int, ...]], list[str]] = {}
    for cell, missing in seeds.items():
        methods.setdefault((cell.bare, tuple(sorted(missing))), []).append(cell.name)
    return methods


def _guess(grid: Grid) -> Callable[[Trial], float]:
    # Middling, but one rate higher at a batch size whose rate is carried over to others, which then differs from theirs.
    guess, rates = middling(grid), grid.rates()
    carried = {block.rate_from_batch_size for block in grid.grid}

    def shifted(trial: Trial) -> float:
        ladder = rates.get(trial.cell, ())
        if trial.batch_size in carried and len(ladder) >= 5:
            middle = len(ladder) // 2
            trial = trial.model_copy(update={"learning_rate": trial.learning_rate * ladder[middle] / ladder[middle + 1]})
        return guess(trial)

    return shifted


def _tested(block: Axes, cells: Sequence[Cell], choices: Mapping[Cell, Choice]) -> Iterator[Trial]:
    for cell in cells:
        chosen = choices.get(replace(cell, batch_size=block.rate_from_batch_size or cell.batch_size))
        if chosen is not None:
            pairs = [(chosen.learning_rate, chosen.damping)]
        else:
            dampings = (block.damping or ()) if cell.method in DAMPED else (None,)
            pairs = list(itertools.product(block.learning_rate or (), dampings))
        for seed, (rate, damping) in itertools.product(block.seed, pairs):
            yield cell.trial(rate, seed, "evaluation", damping)
