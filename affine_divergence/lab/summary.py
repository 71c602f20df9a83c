# What a study found, setting by setting: tuned rates, accuracies, paired differences.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from affine_divergence.lab.grid import Grid
from affine_divergence.lab.statistics import Difference, Interval, holm, mean_interval, paired_difference
from affine_divergence.lab.store import Record
from affine_divergence.lab.study import scores
from affine_divergence.lab.trial import Cell
from affine_divergence.lab.tuning import Choice, plan

REFERENCE = "affine-like"  # the method whose lead over each other one is tested


@dataclass(frozen=True)
class MethodRow:
    """A method in a setting, at the learning rate chosen for it on the validation images."""

    cell: Cell
    choice: Choice
    records: tuple[Record, ...]  # evaluation trials at that rate, by seed
    accuracy: Interval  # of the test images
    diverged: int
    lead: Difference | None  # of the reference over this method, paired by seed
    adjusted_p: float | None  # Holm, over the methods of the setting


@dataclass(frozen=True)
class Setting:
    """Everything but the method: the cells that are compared with each other."""

    cell: Cell
    rows: tuple[MethodRow, ...]
    tried: tuple[Record, ...]  # the trials from which the learning rates were chosen

    @property
    def name(self) -> str:
        budget = f"{self.cell.epochs} epochs" if self.cell.epochs else f"{self.cell.steps} steps"
        return f"{self.cell.depth} × {self.cell.width}, {self.cell.activation}, batch {self.cell.batch_size}, {budget}"

    @property
    def slug(self) -> str:
        budget = f"e{self.cell.epochs}" if self.cell.epochs else f"s{self.cell.steps}"
        return f"{self.cell.depth}x{self.cell.width}-{self.cell.activation}-b{self.cell.batch_size}-{budget}"


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
    settings: dict[Cell, list[MethodRow]] = {}
    for cell in grid.cells():
        if cell not in choices:
            continue
        own = sorted(
            (
                record
                for record in records
                if record.trial.cell == cell
                and record.trial.role == "evaluation"
                and record.trial.learning_rate == choices[cell].learning_rate
                and record.trial.seed in grid.grid.seed
                and record.outcome.test_accuracy is not None
            ),
            key=lambda record: record.trial.seed,
        )
        if own:
            accuracy = mean_interval([_accuracy(record) for record in own])
            diverged = sum(record.outcome.status == "diverged" for record in own)
            row = MethodRow(cell, choices[cell], tuple(own), accuracy, diverged, None, None)
            settings.setdefault(replace(cell, method="none"), []).append(row)
    wanted_role = "evaluation" if grid.tuning is None else "tuning"
    found = []
    for cell, rows in settings.items():
        tried = tuple(r for r in records if r.trial.role == wanted_role and replace(r.trial.cell, method="none") == cell)
        found.append(Setting(cell, tuple(_compared(rows)), tried))
    return Summary(grid, tuple(records), tuple(found), len(planned.missing))


def _best_of_evaluation(grid: Grid, records: Sequence[Record]) -> dict[Cell, Choice]:
    # Without tuning seeds the rate is chosen by the validation accuracy of the evaluation trials themselves.
    accuracies: dict[Cell, dict[float, list[float]]] = {}
    for record in records:
        if record.trial.role == "evaluation" and record.outcome.validation_accuracy is not None:
            rates = accuracies.setdefault(record.trial.cell, {})
            rates.setdefault(record.trial.learning_rate, []).append(record.outcome.validation_accuracy)
    best = {cell: max(sorted(rates), key=lambda rate: fmean(rates[rate])) for cell, rates in accuracies.items()}
    ends = (min(grid.grid.learning_rate), max(grid.grid.learning_rate))
    return {cell: Choice(rate, at_edge=len(grid.grid.learning_rate) > 1 and rate in ends) for cell, rate in best.items()}


def _compared(rows: Sequence[MethodRow]) -> list[MethodRow]:
    reference = next((row for row in rows if row.cell.method == REFERENCE), None)
    if reference is None:
        return list(rows)
    leads = {row.cell.method: _lead(reference, row) for row in rows if row is not reference}
    known = {method: lead for method, lead in leads.items() if lead is not None}
    adjusted = dict(zip(known, holm([lead.p for lead in known.values()]), strict=True))
    return [replace(row, lead=known.get(row.cell.method), adjusted_p=adjusted.get(row.cell.method)) for row in rows]


def _lead(reference: MethodRow, row: MethodRow) -> Difference | None:
    first = {record.trial.seed: _accuracy(record) for record in reference.records}
    second = {record.trial.seed: _accuracy(record) for record in row.records}
    seeds = sorted(first.keys() & second.keys())
    return paired_difference([first[s] for s in seeds], [second[s] for s in seeds]) if len(seeds) > 1 else None


def _accuracy(record: Record) -> float:
    if record.outcome.test_accuracy is None:
        raise ValueError(f"the trial {record.trial.key} has no test accuracy")
    return record.outcome.test_accuracy
