# Intervals and tests against scipy, statsmodels and simulation.
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import ttost_paired

from affine_divergence.lab.statistics import (
    evidence,
    holm,
    mean_interval,
    paired_difference,
    seeds_for_power,
    sign_flip_p,
    slope,
    wilson,
)

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


def test_equal_differences_have_the_p_of_their_sign_flips_not_0_or_nan() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p == 0.5 == sign_flip_p([1.0, 1.0])


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


DIFFERENCES = [a - b for a, b in zip(VALUES, OTHERS, strict=True)]


def test_the_p_values_of_evidence_are_those_of_the_paired_t_tests() -> None:
    found = evidence(DIFFERENCES)
    for alternative, p in (("greater", found.p_greater), ("less", found.p_less), ("two-sided", found.p_two_sided)):
        assert p == pytest.approx(stats.ttest_rel(VALUES, OTHERS, alternative=alternative).pvalue, rel=1e-6), alternative
    assert found.effect_size == pytest.approx(np.mean(DIFFERENCES) / np.std(DIFFERENCES, ddof=1))
    assert found.n == 5


@pytest.mark.parametrize("margin", [0.005, 0.02, 0.0319, 0.0321, 0.05])
def test_the_narrow_interval_lies_within_the_margin_where_both_one_sided_tests_say_so(margin: float) -> None:
    narrow = evidence(DIFFERENCES).narrow
    p, _, _ = ttost_paired(np.array(VALUES), np.array(OTHERS), -margin, margin)
    assert (-margin < narrow.low and narrow.high < margin) == (p < 0.05)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_sign_flip_p_is_that_of_all_signs_written_out(n: int) -> None:
    values = [round(value, 2) for value in np.random.default_rng(n).normal(0.3, 1.0, n).tolist()]
    sums = [abs(math.fsum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((-1, 1), repeat=n)]
    assert sign_flip_p(values) == np.mean([one >= abs(math.fsum(values)) - 1e-12 for one in sums])


def test_the_sign_flip_p_is_that_of_scipy_with_ties_too() -> None:
    for values in ([1.0, 2.0, 3.0, -1.0, 0.5, 0.5, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, -1.0]):
        found = stats.permutation_test((values, [0.0] * len(values)), lambda a, b: np.mean(a - b), permutation_type="samples")
        assert sign_flip_p(values) == pytest.approx(found.pvalue), values


def test_twenty_seeds_are_flipped_exactly_and_more_than_forty_are_not() -> None:
    assert sign_flip_p([1.0] * 20) == 2.0 / 2**20
    assert evidence([1.0, 2.0] * 21).p_sign_flip is None
    with pytest.raises(ValueError, match="at most 40"):
        sign_flip_p([1.0] * 41)


def test_evidence_without_spread_is_as_certain_as_its_sign_flips_or_says_nothing() -> None:
    for value, expected in ((-0.5, (1.0, 1 / 32, 1 / 16)), (0.5, (1 / 32, 1.0, 1 / 16)), (0.0, (1.0, 1.0, 1.0))):
        found = evidence([value] * 5)
        assert (found.p_greater, found.p_less, found.p_two_sided) == expected
        assert (found.narrow.low, found.narrow.high, found.effect_size) == (value, value, math.copysign(math.inf, value) if value else 0.0)
    # Two roundings of one number are one number, and of nothing nothing.
    assert evidence([0.1 + 0.2, 0.3]).deviation == 0.0
    assert evidence([0.1] * 3).deviation == 0.0  # whose mean is 0.10000000000000002
    assert evidence([1e-15, 2e-15, 1e-15]).p_greater == 1.0


def test_evidence_of_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two differences, got 1"):
        evidence([1.0])


def test_a_slope_is_that_of_linregress_and_t_over_slopes_is_that_of_their_paired_t_test() -> None:
    x = [3.0, 5.0, 7.0, 9.0]
    tables = np.random.default_rng(0).normal(size=(2, 6, 4))
    slopes = [[slope(x, row) for row in table] for table in tables.tolist()]
    assert slopes == [[pytest.approx(stats.linregress(x, row).slope) for row in table] for table in tables]
    differences = [slope(x, row) for row in (tables[0] - tables[1]).tolist()]
    assert evidence(differences).p_less == pytest.approx(stats.ttest_rel(*slopes, alternative="less").pvalue, rel=1e-6)
    with pytest.raises(ValueError, match="two different places"):
        slope([1.0, 1.0], [0.0, 1.0])


@pytest.mark.parametrize(("size", "level"), [(0.3, 0.05), (0.8, 0.05), (-0.8, 0.05), (0.5, 0.05 / 20), (2.0, 0.0125)])
def test_the_seeds_for_a_power_of_80_percent_are_those_of_statsmodels(size: float, level: float) -> None:
    expected = TTestPower().solve_power(effect_size=abs(size), alpha=level, power=0.8, alternative="larger")
    assert seeds_for_power(size, level) == math.ceil(expected)


def test_no_number_of_seeds_finds_nothing_and_two_find_what_does_not_vary() -> None:
    assert seeds_for_power(0.0, 0.05) is None
    assert seeds_for_power(1e-4, 0.05) is None
    assert seeds_for_power(math.inf, 0.05) == 2
    with pytest.raises(ValueError, match="0 < level < power < 1"):
        seeds_for_power(1.0, 0.9)


@pytest.mark.parametrize("far", [0.0, 5.0])
def test_beating_every_rival_is_found_by_chance_in_at_most_5_percent(far: float) -> None:
    # Two rivals: one as good as the method, one as good or far behind; the method's own scatter is in both differences.
    generator = np.random.default_rng(1)
    found = []
    for own, first, second in generator.normal(size=(1200, 3, 5)):
        found.append(max(evidence((own - first).tolist()).p_greater, evidence((own - second + far).tolist()).p_greater) < 0.05)
    error = 4 * math.sqrt(0.05 * 0.95 / 1200)
    assert np.mean(found) <= 0.05 + error
    if far:
        assert np.mean(found) >= 0.05 - error
