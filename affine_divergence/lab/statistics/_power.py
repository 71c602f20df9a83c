# Power: how many seeds a one-sided paired t test needs.
from __future__ import annotations

import math
from collections.abc import Callable

MOST_SEEDS = 10_000


def seeds_for_power(effect_size: float, level: float, power: float = 0.8) -> int | None:
    """The least n at which the test at that level finds a mean of `effect_size` standard deviations with that power.

    P(t′ > t₁₋ₗₑᵥₑₗ(n − 1)), t′ of the noncentral t distribution with n − 1 degrees of freedom and noncentrality |effect size|·√n.
    None where more than 10,000 seeds would be needed.

    >>> seeds_for_power(0.5, 0.05)
    27
    """
    if not 0.0 < level < 1.0 or not level < power < 1.0:
        raise ValueError(f"wanted 0 < level < power < 1, got level = {level}, power = {power}")
    size = abs(effect_size)
    if math.isinf(size):
        return 2
    return least_seeds(lambda n: _power(size, n, level), power) if size > 0.0 else None


def least_seeds(power_of: Callable[[int], float], power: float) -> int | None:
    """The least n with that power, which grows with n; None where 10,000 seeds have less."""
    if power_of(MOST_SEEDS) < power:
        return None
    low, high = 1, MOST_SEEDS  # the power at `high` suffices, at `low` it does not: one seed has none
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= power else (middle, high)
    return high


def _power(size: float, n: int, level: float) -> float:
    from scipy import stats

    return float(stats.nct.sf(stats.t.ppf(1.0 - level, n - 1), n - 1, size * math.sqrt(n)))
