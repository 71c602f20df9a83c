# Estimands: from the test accuracies of a unit's cells to one value a seed for each comparison, in points.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from affine_divergence.lab.claims._reading import Part
from affine_divergence.lab.claims._units import Line
from affine_divergence.lab.statistics import curvature, slope
from affine_divergence.lab.summary import MethodRow
from affine_divergence.lab.trial import Method

BySeed = Mapping[int, float]
Rows = Sequence[Mapping[Method, MethodRow]]  # those of each place of a line


@dataclass(frozen=True)
class Sample:
    """A comparison's values by seed, in points, and the cells that it needs; no values where one of them was not run.

    `rival` is the same in all units of a part; `detail` says what was chosen for it in this one.
    """

    rival: str
    values: BySeed
    needs: tuple[MethodRow | None, ...]
    detail: str = ""

    @property
    def against(self) -> str:
        return f"{self.rival} ({self.detail})" if self.detail else self.rival


def samples(part: Part, rivals: Sequence[Method], line: Line, rows: Rows) -> list[Sample]:
    """The unit's comparisons, in the order of the rivals."""
    own = tuple(row.get(part.method) for row in rows)
    if part.estimand == "above-chance":
        return [Sample("chance", above_chance(own[0], part.chance or 0.0, part.margin), own)]
    if part.estimand == "interior-signal":
        return interior(line, own)
    if part.estimand == "trend-of-lead":
        best = best_rivals(rivals, rows)
        names = dict.fromkeys(row.cell.method for row in best if row)
        leads = [lead(one, rival) for one, rival in zip(own, best, strict=True)]
        return [Sample("best other method", slopes(line.x, leads), (*own, *best), ", ".join(names))]
    found = []
    for rival in rivals:
        others = tuple(row.get(rival) for row in rows)
        leads = [lead(one, other) for one, other in zip(own, others, strict=True)]
        if part.estimand == "lead":
            values = leads[0]
        elif part.estimand == "parity":
            values = means(leads)
        else:
            values = slopes(line.x, leads)  # slopes are linear
        found.append(Sample(rival, values, own + others))
    return found


def interior(line: Line, own: Sequence[MethodRow | None]) -> list[Sample]:
    """Accuracy at the signal between the ends that validates best − accuracy at each end."""
    known = [one for one in own[1:-1] if one]
    best = max(known, key=lambda one: one.validation) if len(known) == len(own) - 2 else None
    ends = [(line.x[0], own[0]), (line.x[-1], own[-1])]
    at = f"best between: {best.cell.signal:g}" if best else ""
    return [Sample(f"signal {2.0**x:g}", lead(best, end), (best, end), at) for x, end in ends]


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


def curvatures(x: Sequence[float], leads: Sequence[BySeed]) -> BySeed:
    """The coefficient of x² in the parabola of each seed that every place has; none with fewer than three places."""
    return {seed: curvature(x, [one[seed] for one in leads]) for seed in _shared(leads)} if len(x) > 2 else {}


def points(method: Method, rows: Rows) -> list[BySeed]:
    """A method's accuracy itself in each place, in points; none where it was not run."""
    return [{seed: 100.0 * value for seed, value in row[method].tests().items()} if method in row else {} for row in rows]


def _shared(leads: Sequence[BySeed]) -> list[int]:
    return sorted(set.intersection(*(set(one) for one in leads)))
