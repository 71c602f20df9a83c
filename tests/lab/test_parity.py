# Parity: differences pooled over settings and judged against a margin, worked out by hand; nets with a pattern in claims.
from __future__ import annotations

import math
from typing import Any

import pytest
from judging import Points, block, judged, leads, p_of_three, part, table
from makers import grid, record
from scipy import stats
from statsmodels.stats.power import TTestPower

from affine_divergence.lab.claims import claims_text, judge, parse_claims
from affine_divergence.lab.statistics import seeds_for_parity
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan


def parity(**fields: Any) -> str:
    return part(**({"estimand": "parity", "direction": None, "cells": {"width": [16, 8]}} | fields))


def apart(*leads: tuple[float, ...]) -> Points:
    # Affine-like's points over the rival by seed, those of width 16 and those of width 8.
    def points(one: Trial) -> float:
        own = leads[one.width == 8][one.seed] if one.method == "affine-like" else 0.0
        return 40.0 + 3.0 * (one.seed % 2) + 5.0 * (one.width == 8) + own

    return points


def test_parity_is_the_mean_over_all_settings_seed_by_seed_and_two_one_sided_tests() -> None:
    blocks = block(width=[16, 8])
    found = judged(parity(), blocks, apart((2.0, -2.0, 1.0), (-1.8, 2.0, -1.2)))
    (unit,) = found.units
    (one,) = unit.comparisons
    assert one.values == pytest.approx({0: 0.1, 1: 0.0, 2: -0.1})
    assert unit.line.name == "mean of 2: 3 × 16/8, tanh, batch 32, 2 epochs"
    assert (found.verdict, unit.p) == ("reproduced", pytest.approx(p_of_three(0.5 / 0.1 * math.sqrt(3))))
    assert one.opposite_p == 1.0
    assert one.evidence is not None
    assert one.evidence.p_two_sided == pytest.approx(1.0)
    # Not a mean of zero makes a parity, but its distance from the margin: p of the nearer end.
    (unit,) = judged(parity(), blocks, apart((0.3, 0.4, 0.5), (0.3, 0.4, 0.5))).units
    assert (unit.verdict, unit.p) == ("undecided", pytest.approx(p_of_three(0.1 / 0.1 * math.sqrt(3))))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parity_is_contradicted_beyond_the_margin_on_either_side_at_twice_the_p_of_that_side(sign: float) -> None:
    ahead = tuple(sign * value for value in (1.5, 1.6, 1.4))
    found = judged(parity(), block(width=[16, 8]), apart(ahead, ahead))
    (one,) = found.units[0].comparisons
    p = p_of_three(1.0 / 0.1 * math.sqrt(3))
    assert (found.verdict, one.opposite_p) == ("contradicted", pytest.approx(2 * p))
    assert one.p == pytest.approx(1 - p)
    # Over all comparisons of the claim: with a second rival, level with the first, four times.
    more = judged(
        parity(rivals=["none", "rms-norm"]), block(width=[16, 8], method=["affine-like", "none", "rms-norm"]), apart(ahead, ahead)
    )
    assert [one.adjusted_opposite_p for one in more.units[0].comparisons] == [pytest.approx(4 * p)] * 2


def test_parity_needs_every_rival_and_every_unit_and_is_never_equivalent() -> None:
    level, off = (0.0, 0.1, -0.1), (0.3, 0.6, 0.1)

    def points(one: Trial) -> float:
        return 40.0 + {"affine-like": 0.0, "norm-like": off[one.seed], "none": level[one.seed], "rms-norm": off[one.seed]}[one.method]

    blocks = block(width=[16, 8], method=["affine-like", "norm-like", "none", "rms-norm"])
    assert judged(parity(), blocks, points).verdict == "reproduced"
    two = judged(parity(rivals=["none", "rms-norm"]), blocks, points)
    (unit,) = two.units
    assert unit.weakest is not None
    assert (two.verdict, unit.weakest.against) == ("undecided", "rms-norm")
    mixture = judged(parity() + parity(method="norm-like"), blocks, points)
    assert [unit.verdict for unit in mixture.units] == ["reproduced", "undecided"]
    assert mixture.units[0].adjusted_p == pytest.approx(2 * (mixture.units[0].p or 0.0))
    assert mixture.verdict == "undecided"


def test_an_undecided_parity_says_how_many_seeds_would_decide_it_on_the_side_where_the_mean_lies() -> None:
    blocks = block(width=[16, 8])
    inside, beyond = (0.5, -0.4, 0.3), (0.4, 1.6, 0.7)
    within = judged(parity() + parity(), blocks, apart(inside, inside)).units[0]
    deviation = stats.tstd(inside)
    assert (within.verdict, within.seeds) == ("undecided", seeds_for_parity(0.4 / 3, deviation, 0.5, 0.025))
    outside = judged(parity(), blocks, apart(beyond, beyond)).units[0]
    expected = TTestPower().solve_power(effect_size=0.4 / stats.tstd(beyond), alpha=0.025, power=0.8, alternative="larger")
    assert (outside.verdict, outside.seeds) == ("undecided", math.ceil(expected))  # one comparison, two sides
    on_it = judged(parity(), blocks, apart((0.4, 0.6, 0.5), (0.4, 0.6, 0.5))).units[0]
    assert (on_it.verdict, on_it.seeds) == ("undecided", None)


def test_a_pooled_unit_needs_every_cell() -> None:
    level = apart((0.0, 0.1, -0.1), (0.0, 0.1, -0.1))
    whole = block(width=16) + block(width=8, method="affine-like")

    def first(unit: Any) -> list[tuple[str, str]]:
        return [(o.kind, o.detail) for o in unit.obstacles]

    (unit,) = judged(parity(), whole, level).units
    assert (unit.verdict, unit.p, first(unit)) == ("undecided", None, [("not run", "none at 3 × 8, tanh, batch 32, 2 epochs")])
    (unit,) = judged(parity(), block(), level).units
    assert first(unit) == [("not run", "3 × 8, tanh, batch 32, 2 epochs")]
    (unit,) = judged(parity(), block(width=9), level).units
    assert first(unit) == [("not run", "the study does not hold it")]
    (unit,) = judged(parity(), block(width=16) + block(width=8, seed=[7, 8]), lambda one: 40.0).units
    assert first(unit) == [("too few seeds", "none shares 0")]
    rates = block(width=16) + block(width=8, learning_rate=[0.1, 0.3, 1.0])
    (unit,) = judged(parity(), rates, lambda one: 40.0 - one.learning_rate + 0.01 * one.seed * (one.method == "none")).units
    assert first(unit) == [
        (
            "rate at the edge",
            "; ".join(f"{method} at 3 × 8, tanh, batch 32, 2 epochs (learning rate 0.1)" for method in ("affine-like", "none")),
        )
    ]
    assert (unit.verdict, unit.adjusted_p) == ("undecided", 1.0)
    partly = judged(parity(), block(width=16, seed=[0, 1, 2, 3]) + block(width=8), lambda one: 40.0)
    assert sorted(partly.units[0].comparisons[0].values) == [0, 1, 2]  # the seeds that all cells have


def test_settings_that_two_tables_of_cells_hold_count_once() -> None:
    text = parity() + table("claim.part.cells", {"activation": ["tanh"], "depth": [3], "width": [8, 4], "batch_size": [32]})
    (unit,) = judged(text, block(width=[16, 8, 4]), lambda one: 40.0).units
    assert [place.cell.width for place in unit.line.places] == [16, 8, 4]


def test_a_lead_without_a_direction_is_shown_and_claims_nothing() -> None:
    text = parity() + part(verdict=False, direction=None)
    shown = judged(text, block(width=[16, 8]), leads(1.0, 2.0, 3.0)).units[1]
    (one,) = shown.comparisons
    assert one.evidence is not None
    assert (shown.verdict, shown.p, one.p, one.opposite_p, shown.obstacles) == (None, None, None, None, ())
    assert one.evidence.p_two_sided == pytest.approx(2 * p_of_three(2 * math.sqrt(3)))


CONVOLUTIONS = block(
    method=[
        "none",
        "batch-norm",
        "layer-norm-sample",
        "layer-norm-position",
        "rms-norm-sample",
        "rms-norm-position",
        "norm-like",
        "affine-like",
    ],
    width=16,
    depth=[2, 4],
    pattern=["k3s2-k3s1", "k5s2"],
    activation=["tanh", "leaky-relu"],
)


def test_the_packaged_claim_of_parity_is_about_eight_architectures() -> None:
    def points(one: Trial) -> float:
        own = {"affine-like": 0.02, "norm-like": -0.05, "none": -3.0, "layer-norm-position": -8.0, "rms-norm-position": -6.0}
        scatter = (0.1 * one.seed) % 0.3 * (one.pattern == "k5s2") * (one.method == "batch-norm")
        return 50.0 + 4.0 * one.depth + own.get(one.method, 0.0) + scatter

    the_grid = grid(f'study = "s"\ndata = "digits"\nclaims = ["C6"]\nprotocols = ["sgd-torch-start"]\n{CONVOLUTIONS}')
    (found,) = judge(parse_claims(claims_text()), summarise(the_grid, [record(t, points(t) / 100) for t in plan(the_grid, {}).missing]))
    affine, norm = found.deciding
    assert (affine.line.name, affine.obstacles) == ("mean of 8: 2/4 × 16 k3s2-k3s1/k5s2, tanh/leaky-relu, batch 32, 2 epochs", ())
    assert affine.comparisons[0].values == pytest.approx({0: 0.02, 1: 0.02 - 0.05, 2: 0.02 - 0.1})
    assert [one.against for one in norm.comparisons] == ["batch-norm", "layer-norm-sample", "rms-norm-sample"]
    shown = [unit for unit in found.units if unit.verdict is None]
    assert len(shown) == 2 + 16
    assert [one.against for one in shown[0].comparisons] == ["none", "layer-norm-position", "rms-norm-position"]
    assert shown[2].line.name == "2 × 16 k3s2-k3s1, tanh, batch 32, 2 epochs"


def test_fully_connected_and_convolutional_cells_are_not_taken_for_each_other() -> None:
    cells = {"width": [16], "depth": [2], "pattern": ["k5s2"]}
    (unit,) = judged(parity(cells=cells), block(depth=2), lambda one: 40.0).units
    assert [(o.kind, o.detail) for o in unit.obstacles] == [("not run", "the study does not hold it")]
    (unit,) = judged(parity(cells={"width": [16], "depth": [2]}), block(depth=2, pattern="k5s2"), lambda one: 40.0).units
    assert unit.obstacles[0].kind == "not run"
    slopes = part(estimand="batch-slope", direction="less", cells=cells | {"batch_size": [8, 32]})
    blocks = block(depth=2, pattern="k5s2", batch_size=[8, 32], method=["affine-like", "none"])
    (unit,) = judged(slopes, blocks, lambda one: 40.0).units
    assert (unit.line.name, unit.obstacles) == ("2 × 16 k5s2, tanh, batch 8…32, 2 epochs", ())
