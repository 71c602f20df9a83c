# Tests against a margin: whether a mean lies within ±margin, whether it lies beyond, and how many seeds the first needs.
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ._intervals import standard_error
from ._paired import DECIMALS, one_sided
from ._power import least_seeds

NODES = 200  # of the quadrature over the deviation


class MarginP(NamedTuple):
    """The p of a mean that lies within ±margin, and of one that lies beyond it."""

    within: float
    beyond: float


def margin_p(values: Sequence[float], margin: float) -> MarginP:
    """Two one-sided paired t tests (TOST) for `within`: the larger p; for `beyond` twice the smaller of those of the other two.

    Within: mean > −margin and mean < margin, both at the level. Beyond: mean > margin or mean < −margin, each at half of it. Without
    spread a p is that of sign flips, as everywhere here.

    >>> found = margin_p([-0.1, 0.0, 0.1], 0.2)
    >>> round(found.within, 4), found.beyond
    (0.0371, 1.0)
    """
    if len(values) < 2 or not margin > 0.0:
        raise ValueError(f"wanted at least two differences and a margin above 0, got {len(values)} and {margin}")
    values = [round(value, DECIMALS) for value in values]
    mean, error, n = round(math.fsum(values) / len(values), DECIMALS), standard_error(values), len(values)
    above_low, below_low = one_sided(mean + margin, error, n)
    above_high, below_high = one_sided(mean - margin, error, n)
    return MarginP(max(above_low, below_high), min(1.0, 2.0 * min(above_high, below_low)))


def seeds_for_parity(mean: float, deviation: float, margin: float, level: float, power: float = 0.8) -> int | None:
    """The least n at which both one-sided tests together find with that power that the mean lies within ±margin.

    None where it does not, or where more than 10,000 seeds would be needed.

    >>> seeds_for_parity(0.0, 1.0, 0.5, 0.05)
    36
    """
    if abs(mean) >= margin:
        return None
    if deviation == 0.0:
        return math.floor(-math.log2(level)) + 1  # the first n with 2⁻ⁿ below the level
    return least_seeds(lambda n: parity_power(abs(mean) / deviation, margin / deviation, n, level), power)


def parity_power(mean: float, margin: float, n: int, level: float) -> float:
    """The power of two one-sided tests at n seeds, mean and margin in standard deviations.

    E Φ(√n·(margin − mean) − t·s) − Φ(t·s − √n·(margin + mean)) over s = √(χ²/(n − 1)) ≤ √n·margin/t, t = t₁₋ₗₑᵥₑₗ(n − 1).
    """
    import numpy as np
    from scipy import stats

    t = float(stats.t.ppf(1.0 - level, n - 1))
    root = math.sqrt(n)
    most = float(stats.chi2.cdf((n - 1) * (root * margin / t) ** 2, n - 1))  # with a larger deviation nothing is found
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    s = np.sqrt(stats.chi2.ppf(most * (nodes + 1.0) / 2.0, n - 1) / (n - 1))
    found = stats.norm.cdf(root * (margin - mean) - t * s) - stats.norm.cdf(t * s - root * (margin + mean))
    return float(most / 2.0 * (weights @ found))
