# The rule that stops tuning trials early: what it stops, how a grid file gives it, and what goes with it.
from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from makers import PROVENANCE, TUNED, grid, record, trial

from affine_divergence.cli.main import call
from affine_divergence.lab import stacks
from affine_divergence.lab.benchmarks import _stopping
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet, to_frame
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.stopping import Rung, Standing, stopped
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

RULE = (Rung(after=0.2, behind=10.0), Rung(after=0.5, behind=5.0))


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.1, {3}), (0.2, {2, 3}), (0.4, {2, 3}), (0.5, {1, 2, 3})],
)
def test_trials_behind_the_best_of_their_group_are_stopped(share: float, wanted: set[int]) -> None:
    accuracies = [("a", 0.50, 1.0), ("a", 0.44, 1.0), ("a", 0.39, 1.0), ("a", 0.60, math.nan), ("b", 0.20, 1.0)]
    found = stopped(RULE, share, [Standing(*one) for one in accuracies])
    assert set(found) == wanted
    assert found[3] == "its loss is not finite"


def test_a_group_without_a_finite_loss_is_stopped_whole() -> None:
    assert set(stopped(RULE, 0.3, [Standing("a", 0.1, math.inf), Standing("a", 0.1, math.nan)])) == {0, 1}


def test_a_grid_gives_one_rung_or_several() -> None:
    one = grid(TUNED + "stop = { after = 0.2, behind = 10.0 }\n").tuning
    several = grid(TUNED + "stop = [{ after = 0.2, behind = 10.0 }, { after = 0.5, behind = 5.0 }]\n").tuning
    assert one is not None
    assert several is not None
    assert (one.stop, several.stop) == (RULE[:1], RULE)


@pytest.mark.parametrize(
    ("stop", "wanted"),
    [
        ("{ after = 1.0, behind = 10.0 }", "tuning.stop.after: input should be less than 1"),
        ("{ after = 0.2, behind = 0.0 }", "tuning.stop.behind: input should be greater than 0"),
        ("{ after = 0.2 }", "tuning.stop.behind: field required"),
        ("[{ after = 0.2, behind = 5.0 }, { after = 0.2, behind = 4.0 }]", "ascending values of after, got [0.2, 0.2]"),
        ("[]", "tuning.stop: wanted at least one value, got none"),
    ],
)
def test_an_impossible_rule_is_refused_by_field(stop: str, wanted: str) -> None:
    with pytest.raises(BadInputError) as caught:
        grid(TUNED + f"stop = {stop}\n")
    assert wanted in str(caught.value)


def test_the_rule_is_part_of_the_key_of_tuning_trials_alone() -> None:
    checked = grid(TUNED + "stop = { after = 0.2, behind = 10.0 }\n")
    told: dict[Trial, float] = {}
    while stage := plan(checked, told).missing:
        told.update((one, 0.5) for one in stage)
    assert {one.stop for one in told if one.role == "tuning"} == {RULE[:1]}
    assert {one.stop for one in told if one.role == "evaluation"} == {None}
    plain = trial(role="tuning")
    keys = {plain.key, *(plain.model_copy(update={"stop": rule}).key for rule in (RULE, RULE[:1]))}
    assert len(keys) == 3
    with pytest.raises(ValueError, match="stop goes with tuning trials only"):
        trial(stop=RULE)


def test_trials_that_are_compared_stay_in_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_STACK", 7)
    shapes: tuple[dict[str, object], ...] = ({}, {"pattern": "k3s2"})
    for shape in shapes:
        trials = [
            trial(role="tuning", stop=RULE, method=method, seed=seed, learning_rate=0.1 * (1 + rate), **shape)
            for rate in range(3)
            for method in ("none", "affine-like")
            for seed in (5, 6, 7)
        ]
        parts = stacks.stacks(trials)
        assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in trials)
        groups = [{(one.cell, one.seed) for one in part} for part in parts]
        assert sum(map(len, groups)) == len(set().union(*groups)) == 6
        assert {len(part) for part in parts} == ({3} if shape else {6})


def test_stopped_trials_survive_parquet(tmp_path: Path) -> None:
    one = record(trial(role="tuning", stop=RULE), reason="stopped after 50 % of its steps: why", stopped_epoch=2)
    to_frame([one], "tuned", TUNED).write_parquet(tmp_path / "t.parquet")
    _, back, _ = from_frame(read_parquet(tmp_path / "t.parquet"))
    assert back == [one]
    old = to_frame([record(trial())], "tuned", TUNED).drop("stop", "stopped_epoch")
    old.write_parquet(tmp_path / "t.parquet")
    _, back, _ = from_frame(read_parquet(tmp_path / "t.parquet"))
    assert back == [record(trial())]


def ended(curve: list[float], seconds: float = 10.0) -> Outcome:
    return Outcome("done", curve[-1], None, 1.0, [1.0] * len(curve), curve, cpu_seconds=seconds)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A tuned study of five epochs: 0.1 is the best rate, 0.01 learns late and is second, 1.0 stays at chance."""
    text = TUNED.replace("epochs = 1", "epochs = 5").replace("[10, 11, 12]", "[10]").replace('["none", "affine-like"]', '"none"')
    curves = {
        0.01: [0.1, 0.2, 0.5, 0.55, 0.6],
        0.03: [0.2, 0.4, 0.6, 0.65, 0.65],
        0.1: [0.3, 0.5, 0.6, 0.7, 0.8],
        0.3: [0.3, 0.5, 0.6, 0.7, 0.75],
        1.0: [0.1] * 5,
    }
    told: dict[Trial, Outcome] = {}
    while stage := [one for one in plan(grid(text), {t: o.accuracy_curve[-1] for t, o in told.items()}).missing if one.role == "tuning"]:
        told.update((one, ended(curves[one.learning_rate])) for one in stage)
    to_frame([Record(one, outcome, PROVENANCE) for one, outcome in told.items()], "tuned", text).write_parquet(tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


def test_a_replay_costs_what_the_rule_would_have_cost(finished: Path) -> None:
    study = _stopping._study(finished)
    # From 30 % on, 15 points: of 0.01, 0.1 and 1.0 the first and the last end after two of five epochs; of 0.03 and 0.3 none does.
    found = _stopping.replay(study, (Rung(after=0.3, behind=15.0),))
    assert (found.cells, found.same, found.good) == (1, 1, 1)
    assert (found.full_seconds, found.seconds) == (50.0, pytest.approx(30.0 + 2 * 4.0))
    assert found.saved == pytest.approx(0.24)


def test_a_replay_that_chooses_a_worse_rate_says_so(finished: Path) -> None:
    study = _stopping._study(finished)
    (best,) = (one for one in study.outcomes if one.learning_rate == 0.1)
    late = replace(study.outcomes[best], accuracy_curve=[0.1, 0.1, 0.6, 0.7, 0.8])
    study = replace(study, outcomes={**study.outcomes, best: late})
    found = _stopping.replay(study, (Rung(after=0.0, behind=5.0),))
    assert (found.same, found.good) == (0, 0)


def test_bench_stopping_prints_a_line_a_rule(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "stopping", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert len(lines) == len(_stopping.RULES)
    assert lines[3].startswith("0.2: 10 ")
    for arguments in (["stopping"], ["stopping", str(finished), "--repeats", "3"], ["layers", str(finished)]):
        assert call(["bench", *arguments]) == 2
    assert "affdiv bench layers takes no tables" in capsys.readouterr().err
