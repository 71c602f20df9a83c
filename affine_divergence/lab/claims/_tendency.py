# The rule of version 4: whether a claim holds as a tendency over its cells, and in how many. Pure; all in the claimed direction.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from affine_divergence.lab.claims._rule import Verdict, equivalent
from affine_divergence.lab.statistics import Evidence, Interval, holm

Standing = Literal["ahead", "equivalent", "behind", "open"]


@dataclass(frozen=True)
class Pooled:
    """The lead over one rival, seed by seed the mean over all units that count, as a difference whatever the claimed direction."""

    against: str
    units: int  # of which the mean is taken
    evidence: Evidence
    p: float
    opposite_p: float  # Holm, over the rivals


@dataclass(frozen=True)
class Tendency:
    """What a part of a claim says over its units."""

    verdict: Verdict
    standings: tuple[Standing | None, ...]  # of its units; None for one without a verdict
    pooled: tuple[Pooled, ...]

    @property
    def weakest(self) -> Pooled | None:
        """The rival against whom the claim holds least."""
        return max(self.pooled, key=lambda one: one.p, default=None)


def standing(adjusted_p: float, adjusted_opposite_p: float, narrow: Interval, margin: float, level: float) -> Standing:
    """Where a method stands against one rival in one unit; `narrow` is the interval of two one-sided tests."""
    if adjusted_p < level:
        return "ahead"
    if adjusted_opposite_p < level:
        return "behind"
    return "equivalent" if -margin < narrow.low and narrow.high < margin else "open"


def unit_standing(comparisons: Sequence[Standing | None]) -> Standing | None:
    """Behind against one rival is behind; ahead needs all rivals; None where a comparison without a verdict leaves it open."""
    if "behind" in comparisons:
        return "behind"
    if not comparisons or None in comparisons:
        return None
    if all(one == "ahead" for one in comparisons):
        return "ahead"
    return "equivalent" if all(one in ("ahead", "equivalent") for one in comparisons) else "open"


def part_verdict(
    standings: Sequence[Standing | None], pooled: Sequence[Pooled], rivals: int, sign: int, margin: float, level: float
) -> Verdict:
    """The verdict over all units: by the pooled lead over each rival, unless half of the units are behind."""
    known = [one for one in standings if one is not None]
    behind = known.count("behind")
    if known and 2 * behind >= len(known):
        return "contradicted"
    if any(one.opposite_p < level for one in pooled):
        return "contradicted"
    if not known or len(pooled) < rivals or any(2 * one.units < len(standings) for one in pooled):
        return "undecided"
    if all(one.p < level for one in pooled):
        return "reproduced"
    return "equivalent" if equivalent([one.evidence.narrow.scaled(sign) for one in pooled], margin) else "undecided"


def pool(samples: Sequence[tuple[str, int, Evidence]], sign: int) -> tuple[Pooled, ...]:
    """Pooled leads from (rival, units, evidence), with their one-sided p values."""
    pairs = [one.one_sided(sign) for _, _, one in samples]
    opposite = holm([pair[1] for pair in pairs])
    return tuple(
        Pooled(against, units, found, p, adjusted)
        for (against, units, found), (p, _), adjusted in zip(samples, pairs, opposite, strict=True)
    )
