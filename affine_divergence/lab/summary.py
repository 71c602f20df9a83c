# What a study found, setting by setting: tuned rates, accuracies, paired differences.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from affine_divergence.lab.grid import Grid
from affine_divergence.lab.stages import scores
from affine_divergence.lab.statistics import Difference, Interval, holm, mean_interval, paired_difference
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Cell
from affine_divergence.lab.tuning import Choice, plan

REFERENCE = "affine-like"  # the method whose lead over each other one is tested


@dataclass(frozen=True)
class MethodRow:
    """A method in a setting, at the learning rate, and damping, chosen for it on the validation images."""

    cell: Cell
    choice: Choice
    records: tuple[Record, ...]  # evaluation trials at that rate, by seed
    accuracy: Interval  # of the test images
    diverged: int
    lead: Difference | None  # of the reference over this method, paired by seed
    adjusted_p: float | None  # Holm, over the methods of the setting
    wanted: int  # seeds that the grid asks for
    hopeless: bool  # every rate tried for it ended at chance, so none is better than another

    @property
    def at_edge(self) -> bool:
        """Whether a better rate or damping may lie beyond those tried."""
        return bool(self.edges)

    @property
    def edges(self) -> dict[str, float | None]:
        """What is at an edge, by name."""
        choice = self.choice
        values = [("learning rate", choice.learning_rate, choice.at_edge), ("damping", choice.damping, choice.damping_at_edge)]
        return {name: value for name, value, at_edge in values if at_edge and not self.hopeless}

    @property
    def edge(self) -> str:
        """The same in words."""
        return ", ".join(f"{name} {value:g}" for name, value in self.edges.items())

    @property
    def not_finite(self) -> int:
        """Runs whose loss is not finite; the other diverged ones are at chance, perhaps because they never began to learn."""
        return sum(not math.isfinite(loss) for record in self.records if (loss := record.outcome.final_loss) is not None)

    @property
    def validation(self) -> float:
        """Mean validation accuracy of the runs that are tested."""
        return fmean(record.outcome.validation_accuracy or 0.0 for record in self.records)

    @property
    def late_gain(self) -> float | None:
        """Points of validation accuracy gained per epoch at the end: mean of the last two epochs over that of the two before them.

        None with fewer than four epochs.
        """
        curves = [curve for record in self.records if len(curve := record.outcome.accuracy_curve) >= 4]
        gains = [25.0 * (curve[-1] + curve[-2] - curve[-3] - curve[-4]) for curve in curves]
        return fmean(gains) if gains else None

    def tests(self) -> dict[int, float]:
        """Test accuracy by seed."""
        return {record.trial.seed: _accuracy(record) for record in self.records}


@dataclass(frozen=True)
class Setting:
    """Everything but the method: the cells that are compared with each other, at learning rates found in one way.

    `rate_from`: the batch size at which each method's rate was tuned, where the rate is kept over batch sizes; else None.
    """

    cell: Cell
    rate_from: int | None
    rows: tuple[MethodRow, ...]
    tried: tuple[Record, ...]  # the trials from which the learning rates were chosen

    @property
    def name(self) -> str:
        rate = f", rate of batch {self.rate_from}" if self.rate_from else ""
        name = f"{self.cell.architecture}, {self.cell.activation}, batch {self.cell.batch_size}, {self.budget}{rate}"
        return ", ".join(part for part in (name, self.cell.start_name, self.cell.training_name) if part)

    @property
    def budget(self) -> str:
        return f"{self.cell.epochs} epochs" if self.cell.epochs else f"{self.cell.steps} steps"

    @property
    def slug(self) -> str:
        budget = f"e{self.cell.epochs}" if self.cell.epochs else f"s{self.cell.steps}"
        rate = f"-rate-of-b{self.rate_from}" if self.rate_from else ""
        pattern = f"-{self.cell.pattern}" if self.cell.pattern else ""
        cell = self.cell
        values = [cell.start] * (cell.start != "torch") + ([f"signal-{cell.signal:g}"] if cell.signal is not None else [])
        values += [cell.optimizer] * (cell.optimizer != "sgd") + [f"decay-{cell.weight_decay:g}"] * (cell.weight_decay > 0.0)
        values += [cell.schedule] * (cell.schedule != "constant") + [cell.standardise] * (cell.standardise != "channel")
        end = "".join(f"-{value}" for value in values)
        return f"{cell.depth}x{cell.width}{pattern}-{cell.activation}-b{cell.batch_size}-{budget}{rate}{end}"


@dataclass(frozen=True)
class Summary:
    """A study's settings, and how many trials it still lacks."""

    grid: Grid
    records: tuple[Record, ...]
    settings: tuple[Setting, ...]
    missing: int


def summarise(grid: Grid, records: Sequence[Record]) -> Summary:
    """The summary of whatever is finished."""
    planned = plan(grid, scores(records))
    choices = planned.choices if grid.tuning is not None else _best_of_evaluation(grid, records)
    tested: dict[tuple[Cell, float, float | None], list[Record]] = defaultdict(list)
    tried: dict[Cell, list[Record]] = defaultdict(list)
    for record in records:
        trial = record.trial
        if trial.role == "evaluation" and record.outcome.test_accuracy is not None:
            tested[trial.cell, trial.learning_rate, trial.damping].append(record)
        if trial.role == ("evaluation" if grid.tuning is None else "tuning"):
            tried[trial.cell.bare].append(record)
    settings: dict[tuple[Cell, int | None], list[MethodRow]] = {}
    for series in grid.series():
        choice = choices.get(series.rate_of)
        if choice is None:
            continue
        of_choice = tested[series.cell, choice.learning_rate, choice.damping]
        own = [record for record in of_choice if record.trial.seed in series.seeds]
        if own:
            own.sort(key=lambda record: record.trial.seed)
            accuracy = mean_interval([_accuracy(record) for record in own])
            diverged = sum(record.outcome.status == "diverged" for record in own)
            hopeless = _hopeless(series.rate_of, tried)
            row = MethodRow(series.cell, choice, tuple(own), accuracy, diverged, None, None, len(series.seeds), hopeless)
            settings.setdefault((series.cell.bare, series.rate_from), []).append(row)
    found = [
        Setting(cell, rate_from, tuple(_compared(rows)), tuple(tried[cell] if rate_from is None else ()))
        for (cell, rate_from), rows in settings.items()
    ]
    return Summary(grid, tuple(records), tuple(found), len(planned.missing))


def _best_of_evaluation(grid: Grid, records: Sequence[Record]) -> dict[Cell, Choice]:
    # Without tuning seeds the rate is chosen by the validation accuracy of the evaluation trials themselves.
    accuracies: dict[Cell, dict[tuple[float, float | None], list[float]]] = {}
    for record in records:
        if record.trial.role == "evaluation" and record.outcome.validation_accuracy is not None:
            tried = accuracies.setdefault(record.trial.cell, {})
            tried.setdefault((record.trial.learning_rate, record.trial.damping), []).append(record.outcome.validation_accuracy)
    best = {cell: max(sorted(tried), key=lambda one: fmean(tried[one])) for cell, tried in accuracies.items()}
    rates, dampings = grid.rates(), grid.dampings()
    return {
        cell: Choice(rate, _at_edge(rate, rates[cell]), damping, damping is not None and _at_edge(damping, dampings[cell]))
        for cell, (rate, damping) in best.items()
        if cell in rates and (damping is None or cell in dampings)
    }


def _hopeless(cell: Cell, tried: Mapping[Cell, Sequence[Record]]) -> bool:
    own = [record for record in tried.get(cell.bare, ()) if record.trial.cell.name == cell.name]
    return bool(own) and all(record.outcome.status == "diverged" for record in own)


def _at_edge(rate: float, ladder: Sequence[float]) -> bool:
    return len(ladder) > 1 and rate in (min(ladder), max(ladder))


def _compared(rows: Sequence[MethodRow]) -> list[MethodRow]:
    reference = next((row for row in rows if row.cell.name == REFERENCE), None)
    if reference is None:
        return list(rows)
    leads = {row.cell.name: _lead(reference, row) for row in rows if row is not reference}
    known = {method: lead for method, lead in leads.items() if lead is not None}
    adjusted = dict(zip(known, holm([lead.p for lead in known.values()]), strict=True))
    return [replace(row, lead=known.get(row.cell.name), adjusted_p=adjusted.get(row.cell.name)) for row in rows]


def _lead(reference: MethodRow, row: MethodRow) -> Difference | None:
    first, second = reference.tests(), row.tests()
    seeds = sorted(first.keys() & second.keys())
    return paired_difference([first[s] for s in seeds], [second[s] for s in seeds]) if len(seeds) > 1 else None


def _accuracy(record: Record) -> float:
    if record.outcome.test_accuracy is None:
        raise ValueError(f"the trial {record.trial.key} has no test accuracy")
    return record.outcome.test_accuracy
