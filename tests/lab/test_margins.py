# Tests against a margin, against statsmodels, hand-written t tests and simulation.
from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from affine_divergence.lab.claims._rule import seeds_that_decide_parity, unit_verdict
from affine_divergence.lab.statistics import evidence, holm, margin_p, parity_power, seeds_for_parity, seeds_for_power

VALUES = [0.31, -0.12, 0.45, 0.08, -0.2, 0.11]


@pytest.mark.parametrize("shift", [0.0, 0.4, -0.4, 2.0])
def test_within_is_the_tost_of_statsmodels_and_the_narrow_interval(shift: float) -> None:
    values = [value + shift for value in VALUES]
    found = margin_p(values, 0.5)
    expected, *_ = ttost_paired(np.array(values), np.zeros(len(values)), -0.5, 0.5)
    assert found.within == pytest.approx(expected, rel=1e-6)
    narrow = evidence(values).narrow
    assert (found.within < 0.05) == (narrow.low > -0.5 and narrow.high < 0.5)


@pytest.mark.parametrize("shift", [0.0, 0.6, -0.6, 2.0])
def test_beyond_is_twice_the_smaller_p_of_the_two_sides(shift: float) -> None:
    values = [value + shift for value in VALUES]
    above = stats.ttest_1samp(values, 0.5, alternative="greater").pvalue
    below = stats.ttest_1samp(values, -0.5, alternative="less").pvalue
    assert margin_p(values, 0.5).beyond == pytest.approx(min(1.0, 2 * min(above, below)), rel=1e-6)


def test_differences_without_spread_are_as_certain_as_their_sign_flips() -> None:
    assert margin_p([0.1] * 5, 0.5) == (1 / 32, 1.0)
    assert margin_p([0.7] * 5, 0.5) == (1.0, 1 / 16)
    assert margin_p([-0.5] * 5, 0.5) == (1.0, 1.0)  # on the margin
    assert margin_p([0.1 + 0.4, 0.5], 0.5) == (1.0, 1.0)
    assert margin_p([0.1] * 3, 0.1) == (1.0, 1.0)  # whose mean is 0.10000000000000002


@pytest.mark.parametrize(("values", "margin"), [([1.0], 0.5), ([1.0, 2.0], 0.0), ([1.0, 2.0], -1.0)])
def test_a_margin_needs_two_differences_and_a_width(values: list[float], margin: float) -> None:
    with pytest.raises(ValueError, match="two differences and a margin above 0"):
        margin_p(values, margin)


@pytest.mark.parametrize(
    ("mean", "margin", "n", "level"), [(0.0, 1.67, 5, 0.025), (0.67, 1.67, 5, 0.025), (0.3, 1.0, 8, 0.05), (0.0, 0.4, 10, 0.05)]
)
def test_the_power_of_both_tests_together_is_that_of_a_simulation(mean: float, margin: float, n: int, level: float) -> None:
    # The last lies where the sum of both powers − 1, the usual bound, would be negative.
    draws = np.random.default_rng(0).normal(mean, 1.0, size=(40_000, n))
    reach = stats.t.ppf(1 - level, n - 1) * draws.std(axis=1, ddof=1) / math.sqrt(n)
    found = np.mean(np.abs(draws.mean(axis=1)) + reach < margin)
    power = parity_power(mean, margin, n, level)
    assert power == pytest.approx(found, abs=4 * math.sqrt(power * (1 - power) / 40_000))


def test_the_seeds_for_parity_are_the_first_that_have_the_power() -> None:
    n = seeds_for_parity(0.1, 0.6, 0.5, 0.025)
    assert n is not None
    assert parity_power(0.1 / 0.6, 0.5 / 0.6, n, 0.025) >= 0.8 > parity_power(0.1 / 0.6, 0.5 / 0.6, n - 1, 0.025)
    assert seeds_for_parity(-0.1, 0.6, 0.5, 0.025) == n
    assert seeds_for_parity(0.5, 0.6, 0.5, 0.025) is None
    assert seeds_for_parity(0.499, 0.6, 0.5, 0.025) is None
    assert seeds_for_parity(0.1, 0.0, 0.5, 0.025) == 6  # 2⁻⁶ is the first below the level


def test_what_lies_beyond_the_margin_is_decided_by_the_test_of_its_side() -> None:
    said = evidence([0.6, 1.4, 0.4, 0.8])
    expected = seeds_for_power((said.interval.mean - 0.5) / said.deviation, 0.05 / 12)
    assert seeds_that_decide_parity(said, 0.5, 0.05, 2, 6) == expected is not None
    inside = evidence([0.1, 0.9, -0.1, 0.3])
    assert seeds_that_decide_parity(inside, 0.5, 0.05, 2, 6) == seeds_for_parity(inside.interval.mean, inside.deviation, 0.5, 0.025)
    assert seeds_that_decide_parity(evidence([0.25, 0.75]), 0.5, 0.05, 2, 6) is None  # on the margin
    assert seeds_that_decide_parity(evidence([0.5, 0.5]), 0.5, 0.05, 2, 6) is None


@pytest.mark.parametrize("spread", [0.1, 3.0])  # the margin is wide beside the error of the mean, or narrow
def test_on_the_margin_each_wrong_verdict_is_given_in_at_most_5_percent(spread: float) -> None:
    # Two methods against three rivals of which one is just as far off as the margin: nothing is within, nothing beyond.
    found = []
    for scatter in np.random.default_rng(2).normal(scale=spread, size=(1500, 5, 5)):
        own, rivals = scatter[:2], scatter[2:]
        pairs = [[margin_p((a - b + off).tolist(), 0.5) for b, off in zip(rivals, (0.5, 0.0, -0.2), strict=True)] for a in own]
        adjusted = holm([max(one.within for one in unit) for unit in pairs])
        opposite = holm([one.beyond for unit in pairs for one in unit])
        units = [unit_verdict(p, opposite[3 * i : 3 * i + 3], [], 0.5, 0.05, can_be_equivalent=False) for i, p in enumerate(adjusted)]
        found.append(("reproduced" in units, "contradicted" in units))
    error = 4 * math.sqrt(0.05 * 0.95 / 1500)
    assert (np.mean(found, axis=0) <= 0.05 + error).all()


def test_one_comparison_on_the_margin_is_reproduced_in_5_percent_and_contradicted_in_half_of_it() -> None:
    found = [margin_p(draw, 0.5) for draw in np.random.default_rng(3).normal(0.5, 0.2, size=(3000, 5)).tolist()]
    error = 4 * math.sqrt(0.05 * 0.95 / 3000)
    assert np.mean([one.within < 0.05 for one in found]) == pytest.approx(0.05, abs=error)
    assert np.mean([one.beyond < 0.05 for one in found]) == pytest.approx(0.025, abs=error)
    # Where the margin is narrow beside the error both sides are found, together in 5 percent: hence twice the smaller p.
    narrow = [margin_p(draw, 1e-6).beyond < 0.05 for draw in np.random.default_rng(4).normal(1e-6, 1.0, size=(3000, 5)).tolist()]
    assert np.mean(narrow) == pytest.approx(0.05, abs=error)
