# What a study will take: trials that are certain, and the most that tuning may ask for.
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from affine_divergence.lab.grid import Axes, Grid, Tuning
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan


@dataclass(frozen=True)
class Forecast:
    """Cells, and the least and the most trials of each stage."""

    cells: int
    tuning: tuple[int, int]
    evaluation: tuple[int, int]

    @property
    def total(self) -> tuple[int, int]:
        return self.tuning[0] + self.evaluation[0], self.tuning[1] + self.evaluation[1]


def forecast(grid: Grid) -> Forecast:
    """What the grid asks for, whatever its trials turn out to be."""
    series = grid.series()
    cells = len({one.cell for one in series} | set(grid.cells()))
    if grid.tuning is None:
        count = len(plan(grid, {}).missing)
        return Forecast(cells, (0, 0), (count, count))
    dampings = grid.dampings()
    bounds = [_bounds(rates, grid.tuning, len(dampings.get(cell, (None,)))) for cell, rates in grid.rates().items()]
    # A rate fixed by the file may turn out to be the tuned one as well: then a seed of both is one trial.
    least = len({(one.cell, seed) for one in series for seed in one.seeds})
    most = sum(len(one.seeds) for one in series)
    return Forecast(cells, (sum(low for low, _ in bounds), sum(high for _, high in bounds)), (least, most))


@cache
def _bounds(rates: tuple[float, ...], tuning: Tuning, dampings: int) -> tuple[int, int]:
    # Of one cell, whatever it is: cells with the same rates are tuned alike, and so for each damping.
    seed = max(tuning.seeds) + 1
    axes = Axes(
        method=("none",), width=(1,), depth=(1,), activation=("tanh",), batch_size=(1,), steps=(1,), seed=(seed,), learning_rate=rates
    )
    counts = list(_counts(Grid(study="s", data="digits", grid=(axes,), tuning=tuning), {}, 1.0))
    further = min(tuning.extend, 2 * (dampings - 1))  # to either side no more than there are already
    return dampings * min(counts), (dampings + further) * max(counts)


def _counts(grid: Grid, accuracies: Mapping[Trial, float], best: float) -> Iterator[int]:
    """The number of tuning trials of every course that tuning can take: in each stage one of its rates, or none, is the best so far."""
    stage = [trial for trial in plan(grid, accuracies).missing if trial.role == "tuning"]
    if not stage:
        yield len(accuracies)
        return
    better = 10.0 * len(stage) * best  # also on average with what was worse before
    for winner in (None, *dict.fromkeys(trial.learning_rate for trial in stage)):
        told = {trial: better if trial.learning_rate == winner else 0.0 for trial in stage}
        yield from _counts(grid, {**accuracies, **told}, better)
