# Two-stage tuning of the learning rate, and of the damping where a method has one, as a pure function of the trials finished so far.
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from affine_divergence.lab.grid import Grid, Series, Tuning
from affine_divergence.lab.trial import LEAST_DAMPING, MOST_DAMPING, Cell, Trial


@dataclass(frozen=True)
class Choice:
    """The learning rate of a cell, and its damping; at an edge where it is the lowest or highest of all that were tried for it."""

    learning_rate: float
    at_edge: bool
    damping: float | None = None
    damping_at_edge: bool = False


@dataclass(frozen=True)
class Plan:
    """What is known now: the chosen rates and dampings, and the trials still to run before more can be said."""

    choices: dict[Cell, Choice]
    missing: list[Trial]


def plan(grid: Grid, accuracies: Mapping[Trial, float]) -> Plan:
    """The missing trials of the present stage, given the validation accuracies of the finished ones; none when all is done."""
    rates, dampings = grid.rates(), grid.dampings()
    if grid.tuning is None:
        wanted = [
            series.cell.trial(rate, seed, "evaluation", damping)
            for series in grid.series()
            for seed, rate, damping in itertools.product(series.seeds, rates[series.cell], dampings.get(series.cell, (None,)))
        ]
        return Plan({}, [trial for trial in wanted if trial not in accuracies])
    choices: dict[Cell, Choice] = {}
    tuning: list[Trial] = []
    for cell, rates_of_cell in rates.items():
        ladder = Ladder(rates_of_cell)
        if cell in dampings:
            result = _tune_damped(cell, ladder, Ladder(dampings[cell]), grid.tuning, accuracies)
        else:
            result = _tune(cell, None, ladder, grid.tuning, accuracies)
        if isinstance(result, Choice):
            choices[cell] = result
        else:
            tuning.extend(result)
    if tuning:  # stacks fill up best when a stage is finished for every cell first
        return Plan(choices, tuning)
    # A dict: a cell's fixed rate may be its tuned one too, and then its trials serve both.
    evaluation = dict.fromkeys(trial for series in grid.series() for trial in tested(series, choices))
    return Plan(choices, [trial for trial in evaluation if trial not in accuracies])


def tested(series: Series, choices: Mapping[Cell, Choice]) -> list[Trial]:
    """The evaluation trials of a series whose rate is chosen."""
    chosen = choices[series.rate_of]
    return [series.cell.trial(chosen.learning_rate, seed, "evaluation", chosen.damping) for seed in series.seeds]


class Ladder:
    """Ascending learning rates or dampings, continued beyond both ends by mirroring its ratios."""

    def __init__(self, rates: tuple[float, ...]) -> None:
        self.rates = rates

    def __len__(self) -> int:
        return len(self.rates)

    def __getitem__(self, index: int) -> float:
        rates, last = self.rates, len(self.rates) - 1
        if 0 <= index <= last:
            return rates[index]
        mirrored = -index if index < 0 else 2 * last - index
        if not 0 <= mirrored <= last:
            raise IndexError(f"the ladder of {len(rates)} values reaches from {-last} to {2 * last}, not to {index}")
        end = rates[0] if index < 0 else rates[last]
        return float(f"{end * (end / rates[mirrored]):.3g}")

    def reaches(self, index: int) -> bool:
        """Whether there is one with that index, and a floating-point number for it."""
        return -len(self) < index < 2 * len(self) - 1 and 0.0 < self[index] < math.inf


def _tune_damped(
    cell: Cell, ladder: Ladder, dampings: Ladder, tuning: Tuning, accuracies: Mapping[Trial, float]
) -> Choice | list[Trial]:
    # The rate is tuned for each damping; then that damping is taken whose rate did best over the tuning seeds, the smaller on a tie.
    tried = list(range(len(dampings)))
    extensions = 0
    while True:
        choices: dict[int, Choice] = {}
        missing: list[Trial] = []
        for index in tried:
            result = _tune(cell, dampings[index], ladder, tuning, accuracies)
            if isinstance(result, Choice):
                choices[index] = result
            else:
                missing.extend(result)
        if missing:
            return missing
        means = {
            index: _mean(cell, choice.learning_rate, dampings[index], tuning, tuning.seeds, accuracies)
            for index, choice in choices.items()
        }
        best = max(tried, key=lambda index: (means[index], -index))
        at_edge = len(tried) > 1 and len(set(means.values())) > 1 and best in (tried[0], tried[-1])
        further = best + (1 if best == tried[-1] else -1)
        may_be = dampings.reaches(further) and LEAST_DAMPING <= dampings[further] <= MOST_DAMPING
        if not at_edge or extensions == tuning.extend or not may_be:
            return replace(choices[best], damping=dampings[best], damping_at_edge=at_edge)
        tried = sorted([*tried, further])
        extensions += 1


def _tune(
    cell: Cell, damping: float | None, ladder: Ladder, tuning: Tuning, accuracies: Mapping[Trial, float]
) -> Choice | list[Trial]:
    stride = min(tuning.stride, len(ladder) - 1)
    coarse = sorted({*range(0, len(ladder), stride), len(ladder) - 1})
    extensions = 0

    def extended(tried: list[int], best: int) -> list[int] | None:
        # The coarse indices with one more beyond the end of those tried at which the best stands, if it does and there may be one.
        if extensions == tuning.extend or best not in (tried[0], tried[-1]):
            return None
        further = best + (stride if best == tried[-1] else -stride)
        return sorted({*coarse, further}) if ladder.reaches(further) else None

    while True:
        best = _best(cell, damping, ladder, coarse, tuning, tuning.seeds[:1], accuracies)
        if isinstance(best, list):
            return best
        if _level(cell, damping, ladder, coarse, tuning, tuning.seeds[:1], accuracies):
            # At chance everywhere: the rates left out may learn, or other seeds.
            skipped = set(range(len(ladder))) - set(coarse)
            if skipped:
                coarse = sorted({*coarse, *skipped})
                continue
            fine = coarse
        else:
            longer = extended(coarse, best)
            if longer is not None:
                coarse = longer
                extensions += 1
                continue
            fine = [index for index in (best - 1, best, best + 1) if ladder.reaches(index)]
        chosen = _best(cell, damping, ladder, fine, tuning, tuning.seeds, accuracies)
        if isinstance(chosen, list):
            return chosen
        tried = sorted({*coarse, *fine})
        if fine == coarse and _level(cell, damping, ladder, fine, tuning, tuning.seeds, accuracies):
            return Choice(ladder[chosen], at_edge=False)  # it learns at no rate, so none is better beyond
        longer = extended(tried, chosen)
        if longer is None:
            return Choice(ladder[chosen], at_edge=chosen in (tried[0], tried[-1]))
        coarse = longer
        extensions += 1


def _level(
    cell: Cell,
    damping: float | None,
    ladder: Ladder,
    indices: list[int],
    tuning: Tuning,
    seeds: tuple[int, ...],
    accuracies: Mapping[Trial, float],
) -> bool:
    return len({accuracies[tuning.trial(cell, ladder[index], seed, damping)] for index in indices for seed in seeds}) == 1


def _mean(
    cell: Cell, rate: float, damping: float | None, tuning: Tuning, seeds: tuple[int, ...], accuracies: Mapping[Trial, float]
) -> float:
    return fmean(accuracies[tuning.trial(cell, rate, seed, damping)] for seed in seeds)


def _best(
    cell: Cell,
    damping: float | None,
    ladder: Ladder,
    indices: list[int],
    tuning: Tuning,
    seeds: tuple[int, ...],
    accuracies: Mapping[Trial, float],
) -> int | list[Trial]:
    # The index with the highest mean accuracy, the smaller rate on a tie; or the trials that must run before that is known.
    trials = {index: [tuning.trial(cell, ladder[index], seed, damping) for seed in seeds] for index in indices}
    missing = [trial for row in trials.values() for trial in row if trial not in accuracies]
    if missing:
        return missing
    return max(indices, key=lambda index: (_mean(cell, ladder[index], damping, tuning, seeds, accuracies), -index))
