# The summary: chosen rates, paired leads, flags, from accuracies made up for the purpose.
from __future__ import annotations

import pytest
from makers import TINY, TUNED, grid, record, trial
from scipy import stats

from affine_divergence.lab.statistics import holm
from affine_divergence.lab.store import Record
from affine_divergence.lab.study import scores
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

ACCURACY = {("none", 0.03): 0.5, ("none", 0.3): 0.6, ("affine-like", 0.03): 0.4, ("affine-like", 0.3): 0.7}


def accuracy(one: Trial) -> float:
    return ACCURACY[one.method, one.learning_rate] + {0: 0.0, 1: 0.03, 2: 0.02}[one.seed] * (1 if one.method == "none" else 2)


def played(text: str) -> list[Record]:
    done: list[Record] = []
    while missing := plan(grid(text), scores(done)).missing:
        done += [record(one, 1.0 - abs(one.learning_rate - 0.1) + 0.001 * one.seed) for one in missing]
    return done


def test_without_tuning_the_rate_is_the_one_best_on_validation_and_leads_are_paired_by_seed() -> None:
    records = [record(one, accuracy(one)) for one in plan(grid(TINY), {}).missing]
    (setting,) = summarise(grid(TINY), list(reversed(records))).settings
    none, affine = setting.rows
    assert (none.choice.learning_rate, affine.choice.learning_rate) == (0.3, 0.3)
    assert none.accuracy.mean == pytest.approx((0.6 + 0.63 + 0.62) / 3)
    assert none.lead is not None
    expected = stats.ttest_rel([0.7, 0.76, 0.74], [0.6, 0.63, 0.62])
    assert none.lead.interval.mean == pytest.approx((0.1 + 0.13 + 0.12) / 3)
    assert none.lead.p == pytest.approx(expected.pvalue)
    assert none.adjusted_p == pytest.approx(holm([expected.pvalue])[0])
    assert affine.lead is None


def test_a_seed_that_one_method_lacks_is_left_out_of_the_pairs() -> None:
    records = [record(one, accuracy(one)) for one in plan(grid(TINY), {}).missing]
    kept = [r for r in records if not (r.trial.method == "none" and r.trial.seed == 1)]
    summary = summarise(grid(TINY), kept)
    none = summary.settings[0].rows[0]
    assert none.lead is not None
    assert (none.accuracy.n, none.lead.interval.n) == (2, 2)
    assert none.lead.interval.mean == pytest.approx((0.1 + 0.12) / 2)
    assert summary.missing == 2


def test_with_tuning_only_the_trials_tested_at_the_chosen_rate_count() -> None:
    records = played(TUNED)
    stray = record(trial(width=8, depth=1, batch_size=64, epochs=1, learning_rate=0.3, seed=0), 0.99)
    summary = summarise(grid(TUNED), [*records, stray])
    assert summary.missing == 0
    for row in summary.settings[0].rows:
        assert (row.choice.learning_rate, row.choice.at_edge, row.accuracy.n) == (0.1, False, 2)
        assert row.accuracy.mean == pytest.approx(1.0005)
    assert {r.trial.role for r in summary.settings[0].tried} == {"tuning"}


def test_diverged_runs_are_counted_in_the_mean_and_by_number() -> None:
    records = [record(one, accuracy(one)) for one in plan(grid(TINY), {}).missing]
    at = next(i for i, r in enumerate(records) if r.trial.method == "affine-like" and r.trial.learning_rate == 0.3)
    records[at] = record(records[at].trial, 0.1, status="diverged")
    affine = summarise(grid(TINY), records).settings[0].rows[1]
    assert affine.diverged == 1
    assert affine.accuracy.mean == pytest.approx((0.1 + 0.76 + 0.74) / 3)


def test_a_rate_at_the_edge_is_told_unless_every_rate_tried_ended_at_chance() -> None:
    records = [record(one, accuracy(one)) for one in plan(grid(TINY), {}).missing]
    none, affine = summarise(grid(TINY), records).settings[0].rows
    assert (none.choice.at_edge, none.at_edge, none.hopeless) == (True, True, False)
    lost = [record(r.trial, 0.1, status="diverged") if r.trial.method == "none" else r for r in records]
    none, affine = summarise(grid(TINY), lost).settings[0].rows
    assert (none.choice.at_edge, none.at_edge, none.hopeless) == (True, False, True)
    assert affine.at_edge


def test_a_row_says_how_many_seeds_the_grid_wants_and_its_validation_accuracy() -> None:
    records = [record(one, accuracy(one), validation_accuracy=0.25) for one in plan(grid(TINY), {}).missing]
    row = summarise(grid(TINY), [r for r in records if r.trial.seed]).settings[0].rows[0]
    assert (row.accuracy.n, row.wanted, row.validation) == (2, 3, 0.25)
    assert row.tests() == {r.trial.seed: r.outcome.test_accuracy for r in row.records}


def test_settings_are_apart_and_nothing_finished_gives_none() -> None:
    text = TINY.replace("[8]", "[8, 4]").replace('["tanh"]', '["tanh", "leaky-relu"]')
    records = [record(one, accuracy(one)) for one in plan(grid(text), {}).missing]
    assert [s.slug for s in summarise(grid(text), records).settings] == [
        f"2x{w}-{a}-b32-e2" for w in (8, 4) for a in ("tanh", "leaky-relu")
    ]
    assert summarise(grid(TINY), []).settings == ()
    assert summarise(grid(TINY), []).missing == 12
