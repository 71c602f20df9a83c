# Estimands: from the test accuracies of a unit's cells to one value a seed for each comparison, in points.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from affine_divergence.lab.claims._reading import Part
from affine_divergence.lab.claims._units import Line
from affine_divergence.lab.statistics import slope
from affine_divergence.lab.summary import MethodRow
from affine_divergence.lab.trial import Method

BySeed = Mapping[int, float]
Rows = Sequence[Mapping[Method, MethodRow]]  # those of each place of a line


@dataclass(frozen=True)
class Sample:
    """A comparison's values by seed, in points; none where a cell that it needs was not run."""

    against: str
    values: BySeed


def samples(part: Part, line: Line, rows: Rows) -> list[Sample]:
    """The unit's comparisons, in the order of the rivals."""
    if part.estimand == "above-chance":
        return [Sample("chance", above_chance(rows[0].get(part.method), part.chance or 0.0, part.margin))]
    if part.estimand == "trend-of-lead":
        best = best_rivals(part.rivals, rows)
        names = dict.fromkeys(row.cell.method for row in best if row)
        named = f" ({', '.join(names)})" if names else ""
        leads = [lead(own.get(part.method), rival) for own, rival in zip(rows, best, strict=True)]
        return [Sample(f"best other method{named}", slopes(line.x, leads))]
    if part.estimand == "lead":
        return [Sample(rival, lead(rows[0].get(part.method), rows[0].get(rival))) for rival in part.rivals]
    if part.estimand == "parity":
        return [Sample(rival, means([lead(own.get(part.method), own.get(rival)) for own in rows])) for rival in part.rivals]
    return [
        Sample(rival, slopes(line.x, [lead(own.get(part.method), own.get(rival)) for own in rows]))  # slopes are linear
        for rival in part.rivals
    ]


def lead(row: MethodRow | None, rival: MethodRow | None) -> BySeed:
    """Accuracy of a method − accuracy of its rival, over the seeds of both."""
    if row is None or rival is None:
        return {}
    own, other = row.tests(), rival.tests()
    return {seed: 100.0 * (own[seed] - other[seed]) for seed in sorted(own.keys() & other.keys())}


def above_chance(row: MethodRow | None, chance: float, margin: float) -> BySeed:
    """Accuracy − chance − margin."""
    return {} if row is None else {seed: 100.0 * accuracy - chance - margin for seed, accuracy in sorted(row.tests().items())}


def best_rivals(rivals: Sequence[Method], rows: Rows) -> list[MethodRow | None]:
    """The rival with the highest mean validation accuracy in each place, the first of equals; None where not all were run."""
    best: list[MethodRow | None] = []
    for row in rows:
        found = [row[rival] for rival in rivals if rival in row]
        best.append(max(found, key=lambda one: one.validation) if len(found) == len(rivals) else None)
    return best


def slopes(x: Sequence[float], leads: Sequence[BySeed]) -> BySeed:
    """The slope along x of each seed that every place has."""
    return {seed: slope(x, [one[seed] for one in leads]) for seed in _shared(leads)}


def means(leads: Sequence[BySeed]) -> BySeed:
    """The mean over places of each seed that every place has."""
    return {seed: fmean(one[seed] for one in leads) for seed in _shared(leads)}


def own_slopes(method: Method, line: Line, rows: Rows) -> BySeed:
    """The slope of a method's accuracy itself, in points; none where a place was not run."""
    tests = [row[method].tests() if method in row else {} for row in rows]
    return slopes(line.x, [{seed: 100.0 * value for seed, value in one.items()} for one in tests])


def _shared(leads: Sequence[BySeed]) -> list[int]:
    return sorted(set.intersection(*(set(one) for one in leads)))
