# What a study costs: nominal and timed seconds, stacks bounded by them, blocks, and what fits into given hours.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from makers import TUNED, grid, trial

from affine_divergence.cli.main import call
from affine_divergence.cli.plan import _seeds
from affine_divergence.lab import stacks, worker
from affine_divergence.lab.budget import costs, endings, expected, left_out
from affine_divergence.lab.costs import evaluations_of, nominal_seconds, steps_of
from affine_divergence.lab.data import load, make_splits
from affine_divergence.lab.forecast import forecast
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.stacks import MAX_SECONDS, shape_of
from affine_divergence.lab.timings import Probe, Timing
from affine_divergence.lab.trial import Trial

RECORDS = Path(__file__).parents[2] / "records"

BLOCKS = TUNED.replace("[grid]", "[[grid]]").replace(
    "[tuning]",
    """
    [[grid]]
    method = ["none", "affine-like"]
    width = 8
    depth = 1
    activation = "tanh"
    batch_size = [32, 64]
    rate_from_batch_size = 64
    seed = [0, 1, 2]
    epochs = 1
    [tuning]
    """,
)


def test_steps_and_evaluations_are_those_of_the_training() -> None:
    assert steps_of(trial(epochs=3)) == 3 * 36  # 1149 digits in batches of 32
    assert steps_of(trial(epochs=3, drop_last=True)) == 3 * 35
    assert steps_of(trial(epochs=3, train_images=64)) == 6
    assert steps_of(trial(epochs=None, steps=40)) == 40
    assert evaluations_of(trial(epochs=None, steps=40)) == 2 * 288 + 360
    assert evaluations_of(trial(epochs=3, role="tuning")) == 3 * 288


def test_nominal_seconds_are_near_those_of_the_record() -> None:
    _, records, _ = from_frame(read_parquet(RECORDS / "fully-connected" / "trials.parquet"))
    measured: Counter[object] = Counter()
    nominal: Counter[object] = Counter()
    for one in records:
        measured[shape_of(one.trial), one.trial.steps] += one.outcome.cpu_seconds or 0.0  # type: ignore[assignment]
        nominal[shape_of(one.trial), one.trial.steps] += nominal_seconds(one.trial)  # type: ignore[assignment]
    assert all(0.8 < nominal[shape] / measured[shape] < 1.2 for shape in measured)


def test_a_timed_shape_costs_its_timed_steps_and_evaluations() -> None:
    one = trial(pattern="k3s2", epochs=1, role="tuning")
    assert Timing(2.0, 3.0, 0.01).seconds(one) == 36 * 2.0 + 288 * 0.01
    assert Timing(2.0, 1.0, 0.01).seconds(one) == 36 * 1.0 + 288 * 0.01
    assert Timing(2.0, 3.0, 0.01).seconds(trial(epochs=1, role="tuning")) == 36 * 3.0 + 288 * 0.01
    assert Timing(None, None).seconds(one) is None
    assert Probe({shape_of(one): Timing(None, None)}).seconds(one) == nominal_seconds(one)


def test_stacks_take_two_minutes_at_most_where_trials_are_short() -> None:
    trials = [trial(seed=seed, method=method) for seed in range(20) for method in ("none", "affine-like", "sample")]

    def seconds(one: Trial) -> float:
        return 40.0 if one.method == "sample" else 10.0

    parts = stacks.stacks(trials, {}, seconds)
    assert sorted(one.key for part in parts for one in part) == sorted(one.key for one in trials)
    assert max(sum(map(seconds, part)) for part in parts) <= MAX_SECONDS
    assert len(parts) <= 12  # 1,200 s in all
    assert [len(part) for part in stacks.stacks(trials[:3], {}, lambda _: 500.0)] == [1, 1, 1]
    assert [len(part) for part in stacks.stacks(trials[:3], {}, lambda _: 70.0)] == [1, 1, 1]  # two of them would take 140 s
    assert stacks.stacks(trials, {}, seconds) == parts


def test_each_trial_is_counted_in_one_block() -> None:
    checked = grid(BLOCKS)
    course = expected(checked, {})
    first, second = costs(course, lambda _: 2.0)
    assert (first.cells, first.tuning, first.evaluation) == (2, 22, 4)
    assert (second.cells, second.tuning, second.evaluation) == (4, 0, 8)  # 64 with seed 2, 32 with three: of two methods
    assert (first.tuning_seconds, first.evaluation_seconds, first.seconds) == (44.0, 8.0, 52.0)
    least, most = forecast(checked).total
    assert least <= sum(map(len, course.stages)) <= most
    done = {one: 0.5 for stage in course.stages[:1] for one in stage}
    assert not set(done) & {one for stage in expected(checked, done).stages for one in stage}


def test_a_carried_rate_counts_as_another_than_the_tuned_one() -> None:
    text = BLOCKS.replace("batch_size = 64\n", "batch_size = [32, 64]\n", 1)
    found = costs(expected(grid(text), {}), lambda _: 1.0)
    assert (found[0].evaluation, found[1].evaluation) == (8, 8)


def test_what_does_not_end_in_time_is_named_by_setting_and_seed() -> None:
    course = expected(grid(TUNED.replace("[0, 1]", "[0, 1, 2]").replace("seeds = [10, 11, 12]", "seeds = [10]")), {})
    ends = endings(course, lambda _: MAX_SECONDS, {}, 2)  # so that each trial is a stack
    tuning = max(end for one, end in ends.items() if one.role == "tuning")
    assert tuning == sum(-(-len(stage) // 2) for stage in course.stages[:-1]) * MAX_SECONDS
    assert max(ends.values()) == tuning + 3 * MAX_SECONDS
    found = left_out(course, lambda one: ends[one] <= tuning + MAX_SECONDS)
    assert [(cell.width, seeds, methods) for (cell, seeds), methods in found.items()] == [(8, (1, 2), ["none", "affine-like"])]
    assert _seeds((1, 2)) == "seeds 1–2"
    assert _seeds((0, 1, 2, 5)) == "seeds 0–2, 5"
    assert _seeds((3,)) == "seed 3"


class Here:
    """Workers that do everything in this process."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@contextmanager
def here(count: int, setup: worker.Setup) -> Iterator[Here]:
    assert (count, setup.data) == (1, "digits")
    yield Here()


def test_plan_times_steps_and_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affine_divergence.cli.plan.processes", here)
    monkeypatch.setattr(worker, "_splits", make_splits(load("digits")))
    monkeypatch.setattr("torch.set_flush_denormal", lambda _: True)  # a setting of the thread, not to outlive this test
    (tmp_path / "grid.toml").write_text(TUNED.replace("epochs = 1", "epochs = 1000"))
    assert call(["plan", str(tmp_path / "grid.toml"), "--hours", "0.001", "--workers", "1"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert any(line.split()[:3] == ["all", "2", "22"] for line in lines)
    assert lines[-1].startswith("4 s with 1 worker, a core each: tuning is not finished, which takes ")
    assert "timing: 1 of 1 shapes" in shown.err
    assert call(["plan", str(tmp_path / "grid.toml"), "--hours", "0"]) == 2
