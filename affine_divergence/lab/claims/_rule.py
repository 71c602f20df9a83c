# The rule: verdicts of units and claims from p values and intervals. Pure; but for parity everything here is in the claimed direction.
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from affine_divergence.lab.statistics import Evidence, Interval, seeds_for_parity, seeds_for_power

Verdict = Literal["reproduced", "contradicted", "equivalent", "undecided"]


def equivalent(narrow: Sequence[Interval], margin: float) -> bool:
    """Two one-sided tests: no comparison is behind by the margin, and one at least is not ahead by it either."""
    return all(one.low > -margin for one in narrow) and any(one.high < margin for one in narrow)


def unit_verdict(
    adjusted_p: float,
    adjusted_opposite: Sequence[float],
    narrow: Sequence[Interval],
    margin: float,
    level: float,
    *,
    can_be_equivalent: bool,
) -> Verdict:
    """The verdict of a unit that nothing stands in the way of."""
    if adjusted_p < level:
        return "reproduced"
    if min(adjusted_opposite) < level:
        return "contradicted"
    return "equivalent" if can_be_equivalent and equivalent(narrow, margin) else "undecided"


def claim_verdict(units: Sequence[Verdict]) -> Verdict:
    """Contradicted by one unit; reproduced by all; equivalent if all are at least that; else undecided."""
    if "contradicted" in units:
        return "contradicted"
    if all(unit == "reproduced" for unit in units):
        return "reproduced"
    return "equivalent" if all(unit in ("reproduced", "equivalent") for unit in units) else "undecided"


def seeds_that_decide(weakest: Evidence, sign: int, level: float, units: int, comparisons: int) -> int | None:
    """Seeds for a power of 80 % at the effect seen, one-sided in its direction, at the level over the family's size."""
    family = units if sign * weakest.effect_size > 0.0 else comparisons
    return seeds_for_power(weakest.effect_size, level / family)


def seeds_that_decide_parity(weakest: Evidence, margin: float, level: float, units: int, comparisons: int) -> int | None:
    """Seeds for a power of 80 % at the mean and deviation seen, within the margin or beyond it, at the level over the family's size.

    Beyond the margin it is that of the test on the side of the mean, which has half the level; none where the mean lies on the margin.
    """
    excess = abs(weakest.interval.mean) - margin
    if excess < 0.0:
        return seeds_for_parity(weakest.interval.mean, weakest.deviation, margin, level / units)
    size = excess / weakest.deviation if weakest.deviation else math.copysign(math.inf, excess) if excess else 0.0
    return seeds_for_power(size, level / (2 * comparisons))
