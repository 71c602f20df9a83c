# Two-stage tuning of the learning rate, as a pure function of the trials finished so far.
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from affine_divergence.lab.grid import Grid, Tuning
from affine_divergence.lab.trial import Cell, Trial


@dataclass(frozen=True)
class Choice:
    """The learning rate of a cell; at_edge where it is the lowest or highest of all that were tried for it."""

    learning_rate: float
    at_edge: bool


@dataclass(frozen=True)
class Plan:
    """What is known now: the chosen rates, and the trials still to run before more can be said."""

    choices: dict[Cell, Choice]
    missing: list[Trial]


def plan(grid: Grid, accuracies: Mapping[Trial, float]) -> Plan:
    """The missing trials of the present stage, given the validation accuracies of the finished ones; none when all is done."""
    if grid.tuning is None:
        rates = grid.rates()
        wanted = [
            series.cell.trial(rate, seed, "evaluation")
            for series in grid.series()
            for seed, rate in itertools.product(series.seeds, rates[series.cell])
        ]
        return Plan({}, [trial for trial in wanted if trial not in accuracies])
    choices: dict[Cell, Choice] = {}
    tuning: list[Trial] = []
    for cell, rates_of_cell in grid.rates().items():
        result = _tune(cell, Ladder(rates_of_cell), grid.tuning, accuracies)
        if isinstance(result, Choice):
            choices[cell] = result
        else:
            tuning.extend(result)
    if tuning:  # stacks fill up best when a stage is finished for every cell first
        return Plan(choices, tuning)
    # A dict: a cell's fixed rate may be its tuned one too, and then its trials serve both.
    evaluation = dict.fromkeys(
        series.cell.trial(choices[series.rate_of].learning_rate, seed, "evaluation") for series in grid.series() for seed in series.seeds
    )
    return Plan(choices, [trial for trial in evaluation if trial not in accuracies])


class Ladder:
    """Ascending learning rates, continued beyond both ends by mirroring its ratios."""

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
            raise IndexError(f"the ladder of {len(rates)} rates reaches from {-last} to {2 * last}, not to {index}")
        end = rates[0] if index < 0 else rates[last]
        return float(f"{end * (end / rates[mirrored]):.3g}")

    def reaches(self, index: int) -> bool:
        """Whether there is a rate with that index, and a floating-point number for it."""
        return -len(self) < index < 2 * len(self) - 1 and 0.0 < self[index] < math.inf


def _tune(cell: Cell, ladder: Ladder, tuning: Tuning, accuracies: Mapping[Trial, float]) -> Choice | list[Trial]:
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
        best = _best(cell, ladder, coarse, tuning.seeds[:1], accuracies)
        if isinstance(best, list):
            return best
        if _level(cell, ladder, coarse, tuning.seeds[:1], accuracies):  # at chance everywhere: the rates left out may learn, or other seeds
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
        chosen = _best(cell, ladder, fine, tuning.seeds, accuracies)
        if isinstance(chosen, list):
            return chosen
        tried = sorted({*coarse, *fine})
        if fine == coarse and _level(cell, ladder, fine, tuning.seeds, accuracies):
            return Choice(ladder[chosen], at_edge=False)  # it learns at no rate, so none is better beyond
        longer = extended(tried, chosen)
        if longer is None:
            return Choice(ladder[chosen], at_edge=chosen in (tried[0], tried[-1]))
        coarse = longer
        extensions += 1


def _level(cell: Cell, ladder: Ladder, indices: list[int], seeds: tuple[int, ...], accuracies: Mapping[Trial, float]) -> bool:
    return len({accuracies[cell.trial(ladder[index], seed, "tuning")] for index in indices for seed in seeds}) == 1


def _best(
    cell: Cell, ladder: Ladder, indices: list[int], seeds: tuple[int, ...], accuracies: Mapping[Trial, float]
) -> int | list[Trial]:
    # The index with the highest mean accuracy, the smaller rate on a tie; or the trials that must run before that is known.
    trials = {index: [cell.trial(ladder[index], seed, "tuning") for seed in seeds] for index in indices}
    missing = [trial for row in trials.values() for trial in row if trial not in accuracies]
    if missing:
        return missing
    return max(indices, key=lambda index: (fmean(accuracies[trial] for trial in trials[index]), -index))
