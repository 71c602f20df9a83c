# Paired tests: what the differences of two methods over the same seeds say.
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._intervals import Interval, mean_interval, standard_error

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DECIMALS = 9  # of a point: closer differences are equal, and what is nearer to 0 is rounding; the images make steps of 0.01
MOST_FLIPPED = 40  # 2^20 sums for each half of the values


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over n seeds, its interval, and the p of the two-sided paired t test."""

    interval: Interval
    p: float


@dataclass(frozen=True)
class Evidence:
    """What n ≥ 2 paired differences say about their mean: both intervals, the p of each one-sided paired t test and of both sides.

    `narrow` is the interval of two one-sided tests for equivalence: at confidence 1 − 2·level where `interval` is at 1 − level.
    `p_sign_flip` is exact, two-sided, and None for more than 40 values.
    """

    interval: Interval
    narrow: Interval
    deviation: float
    p_greater: float
    p_less: float
    p_two_sided: float
    p_sign_flip: float | None

    @property
    def n(self) -> int:
        return self.interval.n

    def one_sided(self, sign: int) -> tuple[float, float]:
        """The p of a mean on the side of the sign, and of one on the other side."""
        return (self.p_greater, self.p_less) if sign > 0 else (self.p_less, self.p_greater)

    @property
    def effect_size(self) -> float:
        """Mean over standard deviation; ±∞ without spread, 0 where the mean is 0."""
        mean = self.interval.mean
        if self.deviation == 0.0:
            return math.copysign(math.inf, mean) if mean else 0.0
        return mean / self.deviation


def paired_difference(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Difference:
    """The difference first − second over paired seeds."""
    values = [a - b for a, b in zip(first, second, strict=True)]
    interval = mean_interval(values, level)
    if interval.n == 1:
        return Difference(interval, math.nan)
    greater, less = one_sided(interval.mean, standard_error(values), interval.n)
    return Difference(interval, min(1.0, 2.0 * min(greater, less)))


def evidence(values: Sequence[float], level: float = 0.05) -> Evidence:
    """The evidence of at least two paired differences, in points.

    Without spread a p is 2⁻ⁿ on the side where the differences lie, 1 on the other; 1 on both where they are all 0.

    >>> found = evidence([1.0, 2.0, 3.0])
    >>> round(found.p_greater, 4), round(found.p_less, 4), found.p_sign_flip
    (0.0371, 0.9629, 0.25)
    """
    if len(values) < 2:
        raise ValueError(f"evidence needs at least two differences, got {len(values)}")
    values = [round(value, DECIMALS) for value in values]
    interval = mean_interval(values, 1.0 - level)
    error = standard_error(values)
    greater, less = one_sided(interval.mean, error, interval.n)
    return Evidence(
        interval=interval,
        narrow=mean_interval(values, 1.0 - 2.0 * level),
        deviation=error * math.sqrt(interval.n),
        p_greater=greater,
        p_less=less,
        p_two_sided=min(1.0, 2.0 * min(greater, less)),
        p_sign_flip=sign_flip_p(values) if len(values) <= MOST_FLIPPED else None,
    )


def sign_flip_p(values: Sequence[float]) -> float:
    """The share of all 2ⁿ ways to choose the signs of the values in which |Σ ± v| reaches |Σ v|: an exact permutation test.

    Each half of the values is summed in all ways; a sum of one half is then looked up among those of the other, which are sorted.
    """
    import numpy as np

    if len(values) > MOST_FLIPPED:
        raise ValueError(f"wanted at most {MOST_FLIPPED} values, got {len(values)}")
    reached = abs(math.fsum(values)) - 1e-9 * math.fsum(map(abs, values))  # sums of other orders are equal up to rounding
    if reached <= 0.0:
        return 1.0
    half = len(values) // 2
    first, second = (_signed_sums(part) for part in (values[:half], values[half:]))
    second.sort()
    above = len(second) - np.searchsorted(second, reached - first, side="left")
    below = np.searchsorted(second, -reached - first, side="right")
    return float((above + below).sum() / (len(first) * len(second)))


def _signed_sums(values: Sequence[float]) -> NDArray[np.float64]:
    import numpy as np

    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    return sums


def one_sided(mean: float, error: float, n: int) -> tuple[float, float]:
    """The p of "the mean is above 0" and of "it is below 0", by the paired t test."""
    from scipy import stats

    if error == 0.0:
        least = 0.5**n  # that of sign flips: n equal differences prove no more
        return (1.0, 1.0) if mean == 0.0 else (least, 1.0) if mean > 0.0 else (1.0, least)
    return float(stats.t.sf(mean / error, n - 1)), float(stats.t.cdf(mean / error, n - 1))
