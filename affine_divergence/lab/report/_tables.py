# The numbers of a report as text: what the page and the terminal both show.
from __future__ import annotations

import math
from dataclasses import dataclass

from affine_divergence.lab.statistics import Interval, wilson
from affine_divergence.lab.summary import REFERENCE, MethodRow, Setting

HEADERS = ("method", "learning rate", "n", "test accuracy, %", "95 % interval", "diverged", f"lead of {REFERENCE}, points", "p", "p, Holm")


@dataclass(frozen=True)
class Line:
    """A method's line of a setting's table."""

    method: str
    cells: tuple[str, ...]
    flags: tuple[str, ...]


def lines(setting: Setting) -> list[Line]:
    """The setting's table, a line a method, its cells under HEADERS."""
    return [Line(row.cell.method, _cells(row), _flags(row)) for row in setting.rows]


def headline(setting: Setting) -> str:
    """One sentence: the reference against the best of the others on validation, as measured."""
    reference = next((row for row in setting.rows if row.cell.method == REFERENCE), None)
    others = [row for row in setting.rows if row.lead is not None]
    if reference is None or not others:
        best = max(setting.rows, key=_validation)
        return f"Best on validation: {best.cell.method}, {percent(best.accuracy.mean)} % of the test images (n = {best.accuracy.n})."
    rival = max(others, key=_validation)
    assert rival.lead is not None
    interval = rival.lead.interval
    return (
        f"{REFERENCE} {percent(reference.accuracy.mean)} %, {rival.cell.method}, the best other method on validation, "
        f"{percent(rival.accuracy.mean)} %: a paired difference of {points(interval)} points (n = {interval.n}, "
        f"p = {p_value(rival.lead.p)}, Holm {p_value(rival.adjusted_p)})."
    )


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def points(interval: Interval) -> str:
    return f"{100 * interval.mean:+.2f} [{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]"


def p_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _validation(row: MethodRow) -> float:
    values = [record.outcome.validation_accuracy or 0.0 for record in row.records]
    return sum(values) / len(values)


def _cells(row: MethodRow) -> tuple[str, ...]:
    accuracy = row.accuracy
    return (
        row.cell.method,
        f"{row.choice.learning_rate:g}" + ("*" if row.choice.at_edge else ""),
        str(accuracy.n),
        percent(accuracy.mean),
        "–" if accuracy.n == 1 else f"[{percent(accuracy.low)}, {percent(accuracy.high)}]",
        f"{row.diverged}/{accuracy.n}",
        "–" if row.lead is None else points(row.lead.interval),
        p_value(None if row.lead is None else row.lead.p),
        p_value(row.adjusted_p),
    )


def _flags(row: MethodRow) -> tuple[str, ...]:
    flags = []
    if row.choice.at_edge:
        flags.append(f"{row.cell.method}: the chosen learning rate is the lowest or highest of all tried, so a better one may lie beyond")
    if row.diverged:
        low, high = wilson(row.diverged, row.accuracy.n)
        flags.append(
            f"{row.cell.method}: {row.diverged} of {row.accuracy.n} runs diverged and count as chance "
            f"(rate {percent(row.diverged / row.accuracy.n)} %, 95 % interval {percent(low)} to {percent(high)} %)"
        )
    return tuple(flags)
