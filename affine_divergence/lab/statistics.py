# Intervals and tests: Student t over seeds, paired differences, Holm, Wilson.
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds with its two-sided confidence interval; the bounds are NaN where n is 1."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over n seeds, its interval, and the p of the two-sided paired t test."""

    interval: Interval
    p: float


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Student's t interval of a mean: at n = 5 a percentile bootstrap would cover 83 %, not 95 %."""
    from scipy import stats

    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf(0.5 + level / 2, n - 1)) * _standard_error(values, mean)
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Difference:
    """The difference first − second over paired seeds."""
    from scipy import stats

    values = [a - b for a, b in zip(first, second, strict=True)]
    interval = mean_interval(values, level)
    error = _standard_error(values, interval.mean) if interval.n > 1 else math.nan
    if error == 0.0:
        return Difference(interval, 1.0 if interval.mean == 0.0 else 0.0)
    p = 2.0 * float(stats.t.sf(abs(interval.mean) / error, interval.n - 1)) if interval.n > 1 else math.nan
    return Difference(interval, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest if not math.isnan(p_values[index]) else math.nan
    return adjusted


def wilson(count: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a rate."""
    from scipy import stats

    if not 0 <= count <= n or n == 0:
        raise ValueError(f"a rate needs 0 ≤ count ≤ n and n > 0, got count = {count}, n = {n}")
    z = float(stats.norm.ppf(0.5 + level / 2))
    rate = count / n
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _standard_error(values: Sequence[float], mean: float) -> float:
    n = len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
