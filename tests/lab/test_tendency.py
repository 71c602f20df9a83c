# Claims of version 4: protocols, the pooled lead, the standing of each cell, and what keeps a comparison from a verdict.
from __future__ import annotations

import math
from typing import Any

import pytest
from judging import Points, block, leads, p_of_three, part, table
from makers import grid, record

from affine_divergence.lab.claims import Judged, claims_text, judge, parse_claims, simulate
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

CLAIM = '[[claim]]\nid = "C"\nstatement = "It is so."\n'


def protocol(**fields: Any) -> str:
    return table("protocol", {"name": "p", "statement": "Trained so.", "claims": ["C"], "start": "torch"} | fields)


def judged(parts: str, blocks: str, points: Points, protocols: str | None = None, **outcome: Any) -> Judged:
    claims = parse_claims("version = 4\nlevel = 0.05\n" + (protocols or protocol()) + CLAIM + parts)
    the_grid = grid(f'study = "s"\ndata = "digits"\nclaims = ["C"]\nprotocols = ["p"]\n{blocks}')
    records: list[Record] = [record(one, points(one) / 100, **outcome) for one in plan(the_grid, {}).missing]
    (found,) = judge(claims, summarise(the_grid, records))
    return found


def by_depth(values: dict[int, tuple[float, float, float]]) -> Points:
    return lambda one: 40.0 + (values[one.depth][one.seed] if one.method == "affine-like" else 0.0)


DEPTHS = {"depth": [2, 3, 5, 8]}


def test_pooled_lead_reproduces_a_claim_that_no_single_cell_proves() -> None:
    values = {2: (1.0, 3.0, 2.0), 3: (3.0, 1.0, 2.0), 5: (2.0, 2.0, 3.5), 8: (2.0, 3.0, 0.9)}
    found = judged(part(cells=DEPTHS), block(depth=[2, 3, 5, 8]), by_depth(values))
    ((_, tendency),) = found.tendencies
    assert (found.verdict, found.strict) == ("reproduced", "undecided")
    assert tendency.standings == ("open",) * 4
    (pooled,) = tendency.pooled
    means = [sum(values[depth][seed] for depth in values) / 4 for seed in range(3)]
    assert pooled.evidence.interval.mean == pytest.approx(sum(means) / 3)
    t = (sum(means) / 3) / (math.sqrt(sum((m - sum(means) / 3) ** 2 for m in means) / 2) / math.sqrt(3))
    assert (pooled.units, pooled.p) == (4, pytest.approx(p_of_three(t)))


def test_half_of_the_cells_behind_contradict_whatever_the_pooled_lead() -> None:
    ahead, behind = (9.0, 9.1, 9.05), (-2.0, -2.01, -1.99)
    found = judged(part(cells=DEPTHS), block(depth=[2, 3, 5, 8]), by_depth({2: ahead, 3: behind, 5: ahead, 8: behind}))
    ((_, tendency),) = found.tendencies
    assert tendency.pooled[0].evidence.interval.low > 0.0
    assert tendency.standings == ("ahead", "behind", "ahead", "behind")
    assert found.verdict == "contradicted"
    one = judged(part(cells=DEPTHS), block(depth=[2, 3, 5, 8]), by_depth({2: ahead, 3: behind, 5: ahead, 8: ahead}))
    assert (one.verdict, one.strict) == ("reproduced", "contradicted")


def test_pooled_lead_below_zero_contradicts_and_one_within_the_margin_is_equivalent() -> None:
    values = {2: (-1.0, -3.0, -2.0), 3: (-3.0, -1.0, -2.0), 5: (-2.0, -2.0, -3.5), 8: (-2.0, -3.0, -0.9)}
    assert judged(part(cells=DEPTHS), block(depth=[2, 3, 5, 8]), by_depth(values)).verdict == "contradicted"
    level = dict.fromkeys((2, 3, 5, 8), (0.1, -0.1, 0.02))
    found = judged(part(cells=DEPTHS), block(depth=[2, 3, 5, 8]), by_depth(level))
    assert (found.verdict, found.tendencies[0][1].standings.count("equivalent")) == ("equivalent", 4)


def test_a_method_at_chance_gives_no_verdict_unless_failing_is_what_is_claimed() -> None:
    def points(one: Trial) -> float:
        return {"affine-like": 40.0 + one.seed, "none": 12.0}[one.method]

    found = judged(part(), block(), points)
    (unit,) = found.units
    assert [obstacle.kind for obstacle in unit.obstacles] == ["did not train"]
    assert (found.verdict, found.strict, unit.standing) == ("undecided", "undecided", None)
    assert judged(part(needs_training=False), block(), points).verdict == "reproduced"


@pytest.mark.parametrize(("last", "verdict"), [(0.421, "undecided"), (0.419, "reproduced")])
def test_a_method_that_gains_more_than_half_a_point_an_epoch_is_bound_by_the_budget(last: float, verdict: str) -> None:
    # 100·(last + 0.40 − 0.40 − 0.40)/4 points an epoch: 0.525 and 0.475.
    found = judged(part(), block(), leads(1.0, 2.0, 3.0), accuracy_curve=[0.2, 0.40, 0.40, 0.40, last])
    assert [obstacle.kind for obstacle in found.units[0].obstacles] == ["budget-bound"] * (verdict == "undecided")
    assert found.verdict == verdict


def test_a_comparison_without_a_verdict_does_not_hide_being_behind_another_rival() -> None:
    def points(one: Trial) -> float:
        return {"affine-like": 40.0 + 0.1 * one.seed, "none": 12.0, "batch-norm": 45.0}[one.method]

    found = judged(part(rivals=["none", "batch-norm"]), block(method=["affine-like", "none", "batch-norm"]), points)
    none, norm = found.units[0].comparisons
    assert (none.standing, norm.standing, found.units[0].standing) == (None, "behind", "behind")
    assert found.verdict == "contradicted"


STARTS = block(start=["torch", "glorot-he"])


def starting(one: Trial) -> float:
    own = {("affine-like", "torch"): 30.0, ("affine-like", "glorot-he"): 44.0, ("none", "torch"): 40.0, ("none", "glorot-he"): 39.0}
    return own[one.method, one.start] + 0.1 * one.seed * (one.method == "none")


def test_best_start_is_chosen_for_each_method_on_validation() -> None:
    found = judged(part(), STARTS, starting, protocol(start="best"))
    (unit,) = found.units
    assert unit.comparisons[0].evidence is not None
    assert unit.comparisons[0].evidence.interval.mean == pytest.approx(4.0 - 0.1)  # glorot-he 44 against torch 40
    assert [member.row.cell.start for member in unit.members if member.row] == ["glorot-he", "torch"]
    assert (found.verdict, unit.line.name) == ("reproduced", "3 × 16, tanh, batch 32, 2 epochs, best starts")


def test_same_start_makes_a_unit_of_each_start_without_rivals_that_lack_it() -> None:
    seeds = list(range(8))
    extra = block(method=["affine-like", "batch-norm"], start="hidden-gain", seed=seeds)
    text, methods = part(rivals=["none", "batch-norm"]), ["affine-like", "none", "batch-norm"]

    def points(one: Trial) -> float:
        return 40.0 if one.method == "batch-norm" else 45.0 if one.start == "hidden-gain" else starting(one)

    blocks = block(method=methods, start=["torch", "glorot-he"], seed=seeds) + extra
    found = judged(text, blocks, points, protocol(start="same"))
    assert [unit.line.name.rpartition("2 epochs")[2] for unit in found.units] == ["", ", start glorot-he", ", start hidden-gain"]
    assert [[one.against for one in unit.comparisons] for unit in found.units] == [["none", "batch-norm"]] * 2 + [["batch-norm"]]
    assert [unit.standing for unit in found.units] == ["behind", "ahead", "ahead"]
    only = judged(text, block(method=methods, start="torch"), points, protocol(start="same", rivals=["batch-norm"]))
    assert [one.against for one in only.units[0].comparisons] == ["batch-norm"]


def test_a_protocol_takes_only_cells_trained_as_it_says() -> None:
    adamw = block(optimizer="adamw", weight_decay=0.01, batch_size=48)
    settings = protocol(optimizer="adamw", weight_decay=0.01, batch_size=48)
    assert judged(part(), adamw, leads(1.0, 2.0, 3.0), settings).verdict == "reproduced"
    (unit,) = judged(part(), block(), leads(1.0, 2.0, 3.0), settings).units
    assert [obstacle.kind for obstacle in unit.obstacles][:1] == ["not run"]


def test_given_rates_are_not_judged_in_a_study_that_tunes_them() -> None:
    tuned = block(learning_rate=[0.03, 0.1, 0.3]) + "[tuning]\nseeds = [10]\n"
    with pytest.raises(BadInputError, match="the protocol p is for learning rates that are given"):
        judged(part(), tuned, lambda one: 40.0 + one.seed, protocol(rates="given"))


def test_interior_signal_compares_the_best_signal_between_with_both_ends() -> None:
    text = part(estimand="interior-signal", rivals=[], cells={"signal": [0.1, 1.0, 4.0, 10.0]})
    blocks = block(method="affine-like", start="fixed-point", signal=[0.1, 1.0, 4.0, 10.0])
    top = {0.1: 40.0, 1.0: 43.0, 4.0: 44.0, 10.0: 41.0}

    def points(one: Trial) -> float:
        assert one.signal is not None
        return top[one.signal] + 0.1 * one.seed * (one.signal == 4.0)

    found = judged(text, blocks, points, protocol(start="fixed-point"))
    low, high = found.units[0].comparisons
    assert (low.against, high.against) == ("signal 0.1 (best between: 4)", "signal 10 (best between: 4)")
    assert (low.values[0], high.values[1]) == (pytest.approx(4.0), pytest.approx(3.1))
    assert found.verdict == "reproduced"
    top[0.1] = 50.0
    assert judged(text, blocks, points, protocol(start="fixed-point")).verdict == "contradicted"


def test_claims_of_version_4_need_a_protocol_that_is_for_them() -> None:
    claims = parse_claims(claims_text())
    with pytest.raises(BadInputError, match="the protocols sgd; the known ones are sgd-torch-start"):
        claims.judged_by(["C1"], ["sgd"])
    with pytest.raises(BadInputError, match=r'the claims C1 are judged under protocols: .* protocols = \["sgd-torch-start", '):
        claims.judged_by(["C1"], ["signal"])
    pairs = claims.judged_by(["C1", "P4"], ["signal", "author"])
    assert [(claim.id, one and one.name) for claim, one in pairs] == [("C1", "author"), ("P4", "signal")]


def test_rule_finds_a_lead_of_one_point_and_no_lead_that_is_not_there() -> None:
    settings = {"studies": 40, "cells": 4, "rivals": 5, "seeds": 10, "deviation": 0.6, "spread": 0.0, "seed": 0}
    nothing, one = simulate(0.0, **settings), simulate(1.0, **settings)  # type: ignore[arg-type]
    assert nothing.tendency["reproduced"] == 0
    assert nothing.tendency["contradicted"] <= 4
    assert (one.tendency["reproduced"], one.tendency["contradicted"]) == (40, 0)
    assert one.strict["reproduced"] < 30
