# What is to be trained next, also where trials have failed: the rest of a study goes on without them.
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from affine_divergence.lab.grid import Grid
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Cell, Trial
from affine_divergence.lab.tuning import Plan, plan, tested


def scores(records: Sequence[Record]) -> dict[Trial, float]:
    """Validation accuracies of the finished trials, by which learning rates are chosen."""
    return {
        record.trial: record.outcome.validation_accuracy for record in records if record.outcome.validation_accuracy is not None
    }


def missing(grid: Grid, accuracies: Mapping[Trial, float], failed: Collection[Trial] = ()) -> list[Trial]:
    """The trials of the present stage without the failed ones, nor what waits for a learning rate that they would have told."""
    waiting = {trial.cell for trial in failed if trial.role == "tuning"}
    told = {**accuracies, **dict.fromkeys(failed, 0.0)}  # any number: what is chosen by it is left out
    while True:
        planned = plan(grid, told)
        left = _without(waiting, grid, planned) if waiting else planned.missing
        if left or not planned.missing:
            return left
        told.update(dict.fromkeys(planned.missing, 0.0))


def stages(grid: Grid, accuracies: Mapping[Trial, float], guess: Callable[[Trial], float]) -> Iterator[list[Trial]]:
    """Every stage of a study from its beginning, with a guess where an accuracy is not known yet."""
    told: dict[Trial, float] = {}
    while stage := plan(grid, told).missing:
        yield stage
        told.update((trial, accuracies[trial] if trial in accuracies else guess(trial)) for trial in stage)


def middling(grid: Grid) -> Callable[[Trial], float]:
    """A guess of accuracies by which values in the middle are the best, so that no range of them is extended for it."""
    rates, dampings = ({cell: math.sqrt(v[0] * v[-1]) for cell, v in ladders.items()} for ladders in (grid.rates(), grid.dampings()))

    def guess(trial: Trial) -> float:
        pairs = (trial.learning_rate, rates.get(trial.cell)), (trial.damping, dampings.get(trial.cell))
        return -sum(abs(math.log(value / middle)) for value, middle in pairs if value and middle)

    return guess


def _without(waiting: Collection[Cell], grid: Grid, planned: Plan) -> list[Trial]:
    if any(trial.role == "tuning" for trial in planned.missing):
        return [trial for trial in planned.missing if trial.cell not in waiting]
    wanted = {trial for series in grid.series() if series.rate_of not in waiting for trial in tested(series, planned.choices)}
    return [trial for trial in planned.missing if trial in wanted]
