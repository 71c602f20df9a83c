# The numbers of a report as text: what the page and the terminal both show.
from __future__ import annotations

import math
from collections.abc import Sequence
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
    return [Line(row.cell.name, _cells(row), tuple(f"{row.cell.name}: {flag}" for flag in flags_of(row))) for row in setting.rows]


def headline(setting: Setting) -> str:
    """One sentence: the reference against the best of the others on validation, as measured."""
    reference = next((row for row in setting.rows if row.cell.name == REFERENCE), None)
    others = [row for row in setting.rows if row.lead is not None]
    if reference is None or not others:
        best = max(setting.rows, key=lambda row: row.validation)
        return f"Best on validation: {best.cell.name}, {percent(best.accuracy.mean)} % of the test images (n = {best.accuracy.n})."
    rival = max(others, key=lambda row: row.validation)
    assert rival.lead is not None
    interval = rival.lead.interval
    return (
        f"{REFERENCE} {percent(reference.accuracy.mean)} %, {rival.cell.name}, the best other method on validation, "
        f"{percent(rival.accuracy.mean)} %: a paired difference of {points(interval)} points (n = {interval.n}, "
        f"p = {p_value(rival.lead.p)}, Holm {p_value(rival.adjusted_p)})."
    )


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def points(interval: Interval) -> str:
    return f"{100 * interval.mean:+.2f} [{100 * interval.low:+.2f}, {100 * interval.high:+.2f}]"


def chosen_rate(row: MethodRow) -> str:
    """The chosen learning rate, and damping, starred where it is the lowest or highest of all tried."""
    choice = row.choice
    rate = f"{choice.learning_rate:g}" + "*" * ("learning rate" in row.edges)
    return rate if choice.damping is None else f"{rate}, damping {choice.damping:g}" + "*" * ("damping" in row.edges)


def p_value(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def diverged(count: int, n: int) -> str:
    """How many runs diverged, with Wilson's interval of the rate where any did."""
    if not count:
        return f"0/{n}"
    low, high = wilson(count, n)
    return f"{count}/{n} [{100 * low:.0f}, {100 * high:.0f}] %"


def flags_of(row: MethodRow) -> list[str]:
    """What a reader should know of a method in a setting beside its numbers."""
    flags = []
    if row.hopeless:
        flags.append("every learning rate tried ended at chance, so none of them is better; the smallest is tested")
    flags += [f"the chosen {what} is the lowest or highest of all tried, so a better one may lie beyond" for what in row.edges]
    if row.diverged:
        low, high = wilson(row.diverged, row.accuracy.n)
        flags.append(
            f"{row.diverged} of {row.accuracy.n} runs diverged and count as chance: {row.not_finite} with a loss that is not finite, "
            f"{row.diverged - row.not_finite} that ended no better than chance "
            f"(rate {percent(row.diverged / row.accuracy.n)} %, 95 % interval {percent(low)} to {percent(high)} %)"
        )
    if row.accuracy.n < row.wanted:
        flags.append(f"{row.accuracy.n} of the {row.wanted} seeds that the grid asks for are there")
    return flags


def matrix(settings: Sequence[Setting]) -> tuple[list[str], list[list[str]]]:
    """All settings in one table: the methods, and a row a setting with each one's accuracy and half its interval."""
    methods = list(dict.fromkeys(row.cell.name for setting in settings for row in setting.rows))
    rows = []
    for setting in settings:
        found = {row.cell.name: row for row in setting.rows}
        seeds = sorted({row.accuracy.n for row in setting.rows})
        n = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]}–{seeds[-1]}"
        rows.append([setting.name, n, *(_short(found[method]) if method in found else "–" for method in methods)])
    return [str(method) for method in methods], rows


def _short(row: MethodRow) -> str:
    accuracy = row.accuracy
    half = "" if accuracy.n == 1 else f" ± {percent(accuracy.high - accuracy.mean)}"
    return percent(accuracy.mean) + half + ("*" if row.at_edge else "") + ("†" if row.diverged else "")


def _cells(row: MethodRow) -> tuple[str, ...]:
    accuracy = row.accuracy
    return (
        row.cell.name,
        chosen_rate(row),
        str(accuracy.n),
        percent(accuracy.mean),
        "–" if accuracy.n == 1 else f"[{percent(accuracy.low)}, {percent(accuracy.high)}]",
        diverged(row.diverged, accuracy.n),
        "–" if row.lead is None else points(row.lead.interval),
        p_value(None if row.lead is None else row.lead.p),
        p_value(row.adjusted_p),
    )
