# Intervals and tests against scipy, statsmodels and simulation.
from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from affine_divergence.lab.statistics import holm, mean_interval, paired_difference, wilson

VALUES = [0.51, 0.53, 0.52, 0.55, 0.50]
OTHERS = [0.50, 0.49, 0.53, 0.51, 0.48]


def test_the_interval_of_a_mean_is_students() -> None:
    interval = mean_interval(VALUES)
    expected = stats.t.interval(0.95, 4, loc=np.mean(VALUES), scale=stats.sem(VALUES))
    assert (interval.low, interval.high) == pytest.approx(expected, rel=1e-12)
    assert (interval.mean, interval.n) == (pytest.approx(np.mean(VALUES)), 5)


@pytest.mark.parametrize("n", [5, 10, 20])
def test_the_95_percent_interval_covers_95_percent_of_the_time(n: int) -> None:
    samples = np.random.default_rng(0).normal(size=(4000, n))
    covered = np.mean([interval.low <= 0.0 <= interval.high for interval in map(mean_interval, samples.tolist())])
    assert covered == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_the_paired_difference_is_that_of_the_paired_t_test() -> None:
    difference = paired_difference(VALUES, OTHERS)
    expected = stats.ttest_rel(VALUES, OTHERS)
    assert difference.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (difference.interval.low, difference.interval.high) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)


def test_differences_without_spread_have_p_0_or_1_not_nan() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p == 0.0


def test_one_seed_has_a_mean_but_no_interval() -> None:
    interval = mean_interval([0.5])
    assert interval.mean == 0.5
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)
    assert math.isnan(paired_difference([0.5], [0.4]).p)


def test_nothing_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


def test_holm_is_that_of_statsmodels_in_the_order_given() -> None:
    p = [0.04, 0.001, 0.03, 0.2, 0.9]
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1].tolist())
    assert holm([]) == []


@pytest.mark.parametrize(("count", "n"), [(0, 5), (2, 5), (5, 5), (7, 20)])
def test_wilson_is_that_of_statsmodels(count: int, n: int) -> None:
    assert wilson(count, n) == pytest.approx(proportion_confint(count, n, method="wilson"), abs=1e-12)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="n > 0"):
        wilson(0, 0)
