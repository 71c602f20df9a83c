# Verdicts: the claims judged by what a study found, claim by claim, unit by unit, comparison by comparison.
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from affine_divergence.lab.claims._estimands import BySeed, Rows, Sample, curvatures, means, points, samples, slopes
from affine_divergence.lab.claims._obstacles import Member, Obstacle, comparison_obstacles, unit_obstacles
from affine_divergence.lab.claims._protocol import Protocol
from affine_divergence.lab.claims._reading import Claim, Claims, Part
from affine_divergence.lab.claims._rule import Verdict, claim_verdict, seeds_that_decide, seeds_that_decide_parity, unit_verdict
from affine_divergence.lab.claims._tendency import Standing, Tendency, part_verdict, pool, standing, unit_standing
from affine_divergence.lab.claims._units import Line, Place, at_best, lines_of
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.statistics import Evidence, Interval, evidence, holm, margin_p, mean_interval
from affine_divergence.lab.summary import MethodRow, Summary
from affine_divergence.lab.trial import Method


@dataclass(frozen=True)
class Results:
    """What a study found and planned, by place and method."""

    summary: Summary
    rows: Mapping[Place, Mapping[Method, MethodRow]]
    planned: frozenset[tuple[Place, Method]]

    @property
    def methods(self) -> list[Method]:
        return list(dict.fromkeys(series.cell.method for series in self.summary.grid.series()))


@dataclass(frozen=True)
class Comparison:
    """A unit against one rival: what its seeds say, in points, method − rival whatever the claimed direction."""

    rival: str  # the same in all units of the part
    against: str  # the rival, and what was chosen for it here
    values: BySeed
    evidence: Evidence | None  # None with fewer than two seeds
    p: float | None  # that the claim holds here; None where none is made
    opposite_p: float | None
    adjusted_opposite_p: float | None  # Holm, over all comparisons of the claim; None in a part that decides nothing
    adjusted_p: float | None = None  # likewise, of p; from version 4 on
    obstacles: tuple[Obstacle, ...] = ()  # those of its own cells; from version 4 on
    standing: Standing | None = None  # None with an obstacle, in a part that decides nothing, and before version 4


@dataclass(frozen=True)
class Slope:
    """A method's own accuracy along the batch size: points per doubling, and the coefficient of a parabola."""

    method: Method
    slope: Interval
    curvature: Interval | None  # None with fewer than three batch sizes


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
    slopes: tuple[Slope, ...]  # of the methods themselves, along the batch size
    standing: Standing | None = None  # over all its comparisons; from version 4 on

    @property
    def weakest(self) -> Comparison | None:
        """The comparison with the largest p."""
        known = [one for one in self.comparisons if one.p is not None]
        return max(known, key=lambda one: one.p or 0.0) if known else None


@dataclass(frozen=True)
class Judged:
    """A claim and its verdict, under a protocol from version 4 on.

    `strict` is the verdict of a test that the claim holds in every unit, which before version 4 is the only one.
    """

    claim: Claim
    verdict: Verdict
    units: tuple[Unit, ...]
    strict: Verdict
    protocol: Protocol | None = None
    tendencies: tuple[tuple[Part, Tendency], ...] = ()  # of the parts that decide; from version 4 on

    @property
    def deciding(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.part.verdict)


def judge(claims: Claims, summary: Summary) -> tuple[Judged, ...]:
    """The claims that the grid file names, under its protocols, judged by the rule at the head of the claims' text."""
    found: dict[Place, dict[Method, MethodRow]] = {}
    for setting in summary.settings:
        place = Place(setting.cell.bare, setting.rate_from)
        for row in setting.rows:  # a rate kept from its own batch size is the tuned one: the same trials, perhaps of other seeds
            if row.cell.gain is not None:
                continue
            method, known = row.cell.method, found.setdefault(place.itself, {})
            if method not in known or row.accuracy.n > known[method].accuracy.n:
                known[method] = row
            best = found.setdefault(at_best(place.itself), {})
            if method not in best or row.validation > best[method].validation:
                best[method] = row
    pairs = claims.judged_by(summary.grid.claims, summary.grid.protocols)
    for _, protocol in pairs:
        if protocol and protocol.rates == "given" and summary.grid.tuning is not None:
            raise BadInputError(f"the protocol {protocol.name} is for learning rates that are given, and this grid file tunes them")
    planned = frozenset((Place(series.cell.bare, series.rate_from).itself, series.cell.method) for series in summary.grid.series())
    results = Results(summary, found, planned)
    return tuple(_judged(claim, protocol, results, claims.level) for claim, protocol in pairs)


def _judged(claim: Claim, protocol: Protocol | None, results: Results, level: float) -> Judged:
    lines = [(part, line) for part in claim.part for line in lines_of(part, results.summary.grid, protocol)]
    units = [_measured(part, protocol, line, results, level) for part, line in lines]
    deciding = [unit for unit in units if unit.part.verdict]
    adjusted = holm([1.0 if unit.obstacles or unit.p is None else unit.p for unit in deciding])
    opposite = holm([1.0 if unit.obstacles or one.opposite_p is None else one.opposite_p for unit in deciding for one in unit.comparisons])
    p_values, opposite_p_values = iter(adjusted), iter(opposite)
    for place, unit in enumerate(units):
        if unit.part.verdict:
            comparisons = tuple(replace(one, adjusted_opposite_p=next(opposite_p_values)) for one in unit.comparisons)
            unit = replace(unit, comparisons=comparisons, adjusted_p=next(p_values))
            units[place] = _decided(unit, level, len(adjusted), len(opposite))
    strict = claim_verdict([unit.verdict for unit in units if unit.verdict])
    if protocol is None:
        return Judged(claim, strict, tuple(units), strict)
    units = _with_standings(units, level)
    tendencies = tuple((part, _tendency([unit for unit in units if unit.part is part], level)) for part in claim.part if part.verdict)
    return Judged(claim, claim_verdict([one.verdict for _, one in tendencies]), tuple(units), strict, protocol, tendencies)


def _with_standings(units: Sequence[Unit], level: float) -> list[Unit]:
    """The units with where they stand, by p values adjusted over all comparisons of the claim that have no obstacle of their own."""
    counted = [one for unit in units if unit.part.verdict for one in unit.comparisons]
    p_values = iter(holm([1.0 if one.obstacles or one.p is None else one.p for one in counted]))
    opposite = iter(holm([1.0 if one.obstacles or one.opposite_p is None else one.opposite_p for one in counted]))
    found = []
    for unit in units:
        if unit.part.verdict:
            comparisons = tuple(_standing(one, next(p_values), next(opposite), unit.part, level) for one in unit.comparisons)
            stands = [one.standing for one in comparisons]
            unit = replace(unit, comparisons=comparisons, standing=_parity(unit) if unit.line.pooled else unit_standing(stands))
        found.append(unit)
    return found


def _standing(one: Comparison, p: float, opposite: float, part: Part, level: float) -> Comparison:
    where = None
    if one.evidence and not one.obstacles and part.estimand != "parity":
        where = standing(p, opposite, one.evidence.narrow.scaled(part.sign), part.margin, level)
    return replace(one, adjusted_p=p, standing=where, adjusted_opposite_p=opposite)


def _parity(unit: Unit) -> Standing | None:
    if unit.obstacles or unit.verdict is None:
        return None
    return {"reproduced": "equivalent", "contradicted": "behind"}.get(unit.verdict, "open")  # type: ignore[return-value]


def _tendency(units: Sequence[Unit], level: float) -> Tendency:
    """What a part's units say together."""
    part = units[0].part
    standings = tuple(unit.standing for unit in units)
    if part.estimand == "parity":  # which is a mean over settings already: its one unit has the verdict
        return Tendency(claim_verdict([unit.verdict or "undecided" for unit in units]), standings, ())
    by_rival: dict[str, list[BySeed]] = {}
    for unit in units:
        for one in unit.comparisons:
            values = by_rival.setdefault(one.rival, [])
            if not one.obstacles and one.evidence:
                values.append(one.values)
    pooled = {rival: means(values) for rival, values in by_rival.items() if values}
    samples_ = [(rival, len(by_rival[rival]), evidence(list(one.values()), level)) for rival, one in pooled.items() if len(one) > 1]
    found = pool(samples_, part.sign)
    return Tendency(part_verdict(standings, found, len(by_rival), part.sign, part.margin, level), standings, found)


def _measured(part: Part, protocol: Protocol | None, line: Line, results: Results, level: float) -> Unit:
    rows = [results.rows.get(place.itself, {}) for place in line.places]
    rivals = [rival for rival in part.rivals if protocol is None or protocol.rivals is None or rival in protocol.rivals]
    if protocol and protocol.start == "same":  # a start that a rival does not have is no comparison with it
        rivals = [rival for rival in rivals if any((place.itself, rival) in results.planned for place in line.places)]
    members = tuple(
        Member(place, method, row.get(method)) for place, row in zip(line.places, rows, strict=True) for method in (part.method, *rivals)
    )
    found_samples = samples(part, rivals, line, rows)
    comparisons = tuple(_compared(part, one, level, protocol) for one in found_samples)
    known = [one.p for one in comparisons if one.p is not None]
    obstacles = unit_obstacles(line, members, found_samples)
    if protocol:
        obstacles = list(dict.fromkeys([*obstacles, *(obstacle for one in comparisons for obstacle in one.obstacles)]))
    return Unit(
        part=part,
        line=line,
        members=members,
        comparisons=comparisons,
        obstacles=tuple(obstacles),
        p=max(known) if known and len(known) == len(comparisons) else None,
        adjusted_p=None,
        verdict=None,
        seeds=None,
        slopes=tuple(_own_slopes(line, rows, results.methods, level)) if part.estimand == "batch-slope" else (),
    )


def _own_slopes(line: Line, rows: Rows, methods: Sequence[Method], level: float) -> Iterator[Slope]:
    for method in methods:
        own = points(method, rows)
        if rising := slopes(line.x, own):
            bends = curvatures(line.x, own)
            curvature = mean_interval(list(bends.values()), 1.0 - level) if bends else None
            yield Slope(method, mean_interval(list(rising.values()), 1.0 - level), curvature)


def _compared(part: Part, sample: Sample, level: float, protocol: Protocol | None) -> Comparison:
    values, said = list(sample.values.values()), None
    p, opposite = None, None
    if len(values) > 1:
        said = evidence(values, level)
        if part.estimand == "parity":
            p, opposite = margin_p(values, part.margin)
        elif not part.claims_nothing:
            p, opposite = said.one_sided(part.sign)
    obstacles = tuple(comparison_obstacles(part, sample)) if protocol else ()
    return Comparison(sample.rival, sample.against, sample.values, said, p, opposite, None, obstacles=obstacles)


def _decided(unit: Unit, level: float, units: int, comparisons: int) -> Unit:
    if unit.obstacles:
        return replace(unit, verdict="undecided")
    sign = unit.part.sign
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
