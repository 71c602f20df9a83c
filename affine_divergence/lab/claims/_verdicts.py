# Verdicts: the claims judged by what a study found, claim by claim, unit by unit, comparison by comparison.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from affine_divergence.lab.claims._estimands import BySeed, own_slopes, samples
from affine_divergence.lab.claims._reading import Claim, Claims, Part
from affine_divergence.lab.claims._rule import Verdict, claim_verdict, seeds_that_decide, seeds_that_decide_parity, unit_verdict
from affine_divergence.lab.claims._units import NO_BUDGET, Line, Place, lines_of
from affine_divergence.lab.statistics import Evidence, Interval, evidence, holm, margin_p, mean_interval
from affine_divergence.lab.summary import MethodRow, Summary
from affine_divergence.lab.trial import Method


@dataclass(frozen=True)
class Obstacle:
    """Why a unit is beyond a verdict."""

    kind: Literal["not run", "too few seeds", "rate at the edge"]
    detail: str


@dataclass(frozen=True)
class Comparison:
    """A unit against one rival: what its seeds say, in points, method − rival whatever the claimed direction."""

    against: str
    values: BySeed
    evidence: Evidence | None  # None with fewer than two seeds
    p: float | None  # that the claim holds here; None where none is made
    opposite_p: float | None
    adjusted_opposite_p: float | None  # Holm, over all comparisons of the claim; None in a part that decides nothing


@dataclass(frozen=True)
class Member:
    """A cell of a unit, and its runs if it has any."""

    place: Place
    method: Method
    row: MethodRow | None


@dataclass(frozen=True)
class Unit:
    """A setting, a line of settings or a budget, and what it says of the claim."""

    part: Part
    line: Line
    members: tuple[Member, ...]
    comparisons: tuple[Comparison, ...]
    obstacles: tuple[Obstacle, ...]
    p: float | None  # the largest of its comparisons; None without evidence for each
    adjusted_p: float | None  # Holm, over the claim's units, 1 for those beyond a verdict; None in a part that decides nothing
    verdict: Verdict | None  # None in a part that decides nothing
    seeds: int | None  # that would decide; None where something else is in the way, or more than 10,000 would be needed
    slopes: tuple[tuple[Method, Interval], ...]  # of the methods themselves, along the batch size

    @property
    def weakest(self) -> Comparison | None:
        """The comparison with the largest p."""
        known = [one for one in self.comparisons if one.p is not None]
        return max(known, key=lambda one: one.p or 0.0) if known else None


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict."""

    claim: Claim
    verdict: Verdict
    units: tuple[Unit, ...]

    @property
    def deciding(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.part.verdict)


def judge(claims: Claims, summary: Summary) -> tuple[Judged, ...]:
    """The claims that the grid file names, judged by the rule at the head of the claims' text."""
    found: dict[Place, dict[Method, MethodRow]] = {}
    for setting in summary.settings:
        place = Place(replace(setting.cell, method="none"), setting.rate_from)
        known = found.setdefault(place.itself, {})
        for row in setting.rows:  # a rate kept from its own batch size is the tuned one: the same trials, perhaps of other seeds
            method = row.cell.method
            if method not in known or row.accuracy.n > known[method].accuracy.n:
                known[method] = row
    return tuple(_judged(claim, summary, found, claims.level) for claim in claims.named(summary.grid.claims))


def _judged(claim: Claim, summary: Summary, found: Mapping[Place, Mapping[Method, MethodRow]], level: float) -> Judged:
    units = [_measured(part, line, summary, found, level) for part in claim.part for line in lines_of(part, summary.grid)]
    deciding = [unit for unit in units if unit.part.verdict]
    adjusted = holm([1.0 if unit.obstacles or unit.p is None else unit.p for unit in deciding])
    opposite = holm([1.0 if unit.obstacles or one.opposite_p is None else one.opposite_p for unit in deciding for one in unit.comparisons])
    p_values, opposite_p_values = iter(adjusted), iter(opposite)
    for place, unit in enumerate(units):
        if unit.part.verdict:
            comparisons = tuple(replace(one, adjusted_opposite_p=next(opposite_p_values)) for one in unit.comparisons)
            unit = replace(unit, comparisons=comparisons, adjusted_p=next(p_values))
            units[place] = _decided(unit, level, len(adjusted), len(opposite))
    return Judged(claim, claim_verdict([unit.verdict for unit in units if unit.verdict]), tuple(units))


def _measured(part: Part, line: Line, summary: Summary, found: Mapping[Place, Mapping[Method, MethodRow]], level: float) -> Unit:
    rows = [found.get(place.itself, {}) for place in line.places]
    members = tuple(
        Member(place, method, row.get(method))
        for place, row in zip(line.places, rows, strict=True)
        for method in (part.method, *part.rivals)
    )
    comparisons = tuple(_compared(part, one.against, one.values, level) for one in samples(part, line, rows))
    known = [one.p for one in comparisons if one.p is not None]
    slopes = []
    if part.estimand == "batch-slope":
        for method in dict.fromkeys(series.cell.method for series in summary.grid.series()):
            if own := own_slopes(method, line, rows):
                slopes.append((method, mean_interval(list(own.values()), 1.0 - level)))
    return Unit(
        part=part,
        line=line,
        members=members,
        comparisons=comparisons,
        obstacles=tuple(_obstacles(line, members, comparisons)),
        p=max(known) if len(known) == len(comparisons) else None,
        adjusted_p=None,
        verdict=None,
        seeds=None,
        slopes=tuple(slopes),
    )


def _compared(part: Part, against: str, values: BySeed, level: float) -> Comparison:
    if len(values) < 2:
        return Comparison(against, values, None, None, None, None)
    said = evidence(list(values.values()), level)
    if part.claims_nothing:
        return Comparison(against, values, said, None, None, None)
    if part.estimand == "parity":
        return Comparison(against, values, said, *margin_p(list(values.values()), part.margin), None)
    p, opposite = (said.p_greater, said.p_less) if part.direction == "greater" else (said.p_less, said.p_greater)
    return Comparison(against, values, said, p, opposite, None)


def _obstacles(line: Line, members: Sequence[Member], comparisons: Sequence[Comparison]) -> list[Obstacle]:
    found = []
    if all(member.row is None for member in members):
        planned = all((place.cell.epochs, place.cell.steps) != NO_BUDGET for place in line.places)
        return [Obstacle("not run", "nothing of it is finished" if planned else "the study does not hold it")]
    absent = [place for place in line.places if all(member.row is None for member in members if member.place == place)]
    missing = [f"{member.method} at {member.place.name}" for member in members if member.row is None and member.place not in absent]
    if absent or missing:
        found.append(Obstacle("not run", "; ".join([place.name for place in absent] + missing)))
    few = [f"{member.method} at {member.place.name} has one" for member in members if member.row and member.row.accuracy.n < 2]
    few += [f"{one.against} shares {len(one.values)}" for one in comparisons if len(one.values) < 2 and not found and not few]
    if few:
        found.append(Obstacle("too few seeds", "; ".join(few)))
    edges = [
        f"{member.method} at {member.place.name} ({member.row.edge})"
        for member in members
        if member.row and member.row.at_edge
    ]
    if edges:
        found.append(Obstacle("rate at the edge", "; ".join(edges)))
    return found


def _decided(unit: Unit, level: float, units: int, comparisons: int) -> Unit:
    if unit.obstacles:
        return replace(unit, verdict="undecided")
    sign = 1 if unit.part.direction == "greater" else -1
    verdict = unit_verdict(
        unit.adjusted_p if unit.adjusted_p is not None else 1.0,
        [one.adjusted_opposite_p for one in unit.comparisons if one.adjusted_opposite_p is not None],
        [one.evidence.narrow.scaled(sign) for one in unit.comparisons if one.evidence],
        unit.part.margin,
        level,
        can_be_equivalent=unit.part.estimand not in ("above-chance", "parity"),
    )
    weakest = unit.weakest
    if verdict != "undecided" or weakest is None or weakest.evidence is None:
        return replace(unit, verdict=verdict)
    if unit.part.estimand == "parity":
        seeds = seeds_that_decide_parity(weakest.evidence, unit.part.margin, level, units, comparisons)
    else:
        seeds = seeds_that_decide(weakest.evidence, sign, level, units, comparisons)
    return replace(unit, verdict=verdict, seeds=seeds)
