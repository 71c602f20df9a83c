# Which convolutional trials are trained together: as timed once for a study, and kept.
from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from makers import grid, trial
from running import results, stored

from affine_divergence.lab import stacks, study, timings, worker
from affine_divergence.lab.benchmarks import step_seconds
from affine_divergence.lab.data import Splits, load, make_splits
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.executors import WorkerDiedError, WorkerNotStartedError
from affine_divergence.lab.frame import from_frame, to_frame
from affine_divergence.lab.stacks import Shape, shape_of
from affine_divergence.lab.store import Store, opened
from affine_divergence.lab.timings import Timing, Timings

CONVOLUTIONS = """
study = "convolutions"
data = "digits"
[grid]
method = ["none", "affine-like"]
width = 2
depth = 1
pattern = "k3s2"
activation = "tanh"
batch_size = 64
learning_rate = [0.1, 0.3, 1.0]
seed = [0, 1, 2, 3, 4]
epochs = 1
[tuning]
seeds = [10, 11]
"""


def conv(**fields: Any) -> Any:
    return trial(**({"pattern": "k3s2"} | fields))


class Answers:
    """Workers that answer at once, each time with the next of some results or exceptions."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = iter(answers), []

    def submit(self, function: object, trials: object) -> Future[Any]:
        assert function is worker.time_step
        self.asked.append(trials)
        future: Future[Any] = Future()
        answer = next(self.answers)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "store") as store:
        yield store


def test_trials_are_trained_together_where_that_was_faster_and_alone_where_it_was_not_or_is_not_known() -> None:
    assert Timing(2.0, 1.0).size == timings.TOGETHER
    assert Timing(1.0, 2.0).size == Timing(1.0, None).size == Timing(None, 1.0).size == Timing(None, None).size == 1
    assert str(Timing(0.002, 0.00111)) == "alone 2.00 ms, 8 together 1.11 ms"
    assert str(Timing(0.002, None)) == "alone 2.00 ms, 8 together –"


def test_stacks_of_convolutional_trials_are_no_larger_than_was_found_best_and_hold_one_method() -> None:
    trials = [conv(method=m, seed=s) for m in ("none", "affine-like") for s in range(10)]
    assert [len(part) for part in stacks.stacks(trials)] == [1] * 20
    sizes = {Shape("affine-like", 8, 2, "k3s2", 32): 4}
    parts = stacks.stacks(trials, sizes)
    assert sorted(len(part) for part in parts) == [1] * 10 + [3, 3, 4]
    assert all(len({one.method for one in part}) == 1 for part in parts)


def test_a_shape_is_what_the_time_of_a_step_depends_on() -> None:
    assert shape_of(trial()).pattern == ""
    assert shape_of(conv(seed=3, learning_rate=9.0, activation="leaky-relu", epochs=7)) == shape_of(conv())
    changes = ({"method": "batch-norm"}, {"width": 9}, {"depth": 3}, {"pattern": "k3s1"}, {"batch_size": 8}, {"optimizer": "adamw"})
    assert len({shape_of(conv(**change)) for change in changes} | {shape_of(conv())}) == 7


def test_each_shape_is_timed_once_and_kept_in_the_store(store: Store) -> None:
    shown: list[tuple[int, int]] = []
    answers = Answers((2.0, 1.0), (1.0, 2.0))
    found = Timings(store)
    found.measure([trial(), conv(), conv(seed=4), conv(width=9)], answers, lambda *now: shown.append(now))  # type: ignore[arg-type]
    assert [(len(trials), len({one.seed for one in trials})) for trials in answers.asked] == [(8, 8), (8, 8)]
    assert shown == [(0, 2), (1, 2), (2, 2)]
    again = Timings(store)
    again.measure([conv(), conv(width=9)], Answers(), lambda *_: pytest.fail("timed twice"))  # type: ignore[arg-type]
    assert again.sizes == {shape_of(conv()): 8, shape_of(conv(width=9)): 1}
    assert again.said(conv()) == {"timing": "alone 2000.00 ms, 8 together 1000.00 ms"}
    assert again.said(trial()) == {}


def test_a_worker_that_dies_at_it_leaves_the_shape_alone_and_one_that_cannot_start_ends_the_study(store: Store) -> None:
    found = Timings(store)
    found.measure([conv()], Answers(WorkerDiedError("killed")), lambda *_: None)  # type: ignore[arg-type]
    assert found.known == {shape_of(conv()): Timing(None, None)}
    with pytest.raises(StudyFailedError, match="no room; give fewer --workers"):
        found.measure([conv(width=9)], Answers(WorkerNotStartedError("no room")), lambda *_: None)  # type: ignore[arg-type]


def test_what_was_timed_before_an_interruption_is_kept(store: Store) -> None:
    def interrupted(finished: int, total: int) -> None:
        if finished == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Timings(store).measure([conv(), conv(width=9)], Answers((2.0, 1.0), (1.0, 2.0)), interrupted)  # type: ignore[arg-type]
    again = Timings(store)
    (kept,) = again.known
    rest = Answers((5.0, 6.0))
    again.measure([conv(), conv(width=9)], rest, lambda *_: None)  # type: ignore[arg-type]
    assert [shape_of(trials[0]) for trials in rest.asked] == [shape for shape in again.known if shape != kept]
    assert set(again.known) == {shape_of(conv()), shape_of(conv(width=9))}
    assert Timings(store).known == again.known


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '{"a": 1}',
        '[[["none", 8, 2, "k3s2"], [1.0, 2.0]]]',
        '[[["none", 8, 2, "k3s2", 32], ["a", 2.0]]]',
        '[[["none", 8, 2, "k3s2", 32], [1.0]]]',
    ],
)
def test_timings_that_were_changed_are_refused_by_name(store: Store, text: str) -> None:
    store.put({"timings": text})
    with pytest.raises(BadInputError, match="the store's timings were changed"):
        Timings(store)


def test_what_goes_wrong_otherwise_ends_the_study_in_words_and_is_not_kept(store: Store) -> None:
    with pytest.raises(StudyFailedError, match="a step could not be timed: ValueError: odd"):
        Timings(store).measure([conv()], Answers(RuntimeError("ValueError: odd")), lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="no such file"):
        Timings(store).measure([conv()], Answers(BadInputError("no such file")), lambda *_: None)  # type: ignore[arg-type]
    assert Timings(store).known == {}


def test_what_cannot_be_trained_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = make_splits(load("digits"))
    alone, together, evaluation = step_seconds([conv(width=4, seed=seed) for seed in range(3)], splits)
    assert alone is not None
    assert together is not None
    assert evaluation is not None
    assert 0.0 < evaluation < together < 1.0

    from affine_divergence.lab.benchmarks import _steps

    make_stack = _steps.make_stack
    most = 1

    def limited(trials: list[Any], *arguments: Any) -> Any:
        if len(trials) > most:
            raise MemoryError
        return make_stack(trials, *arguments)

    monkeypatch.setattr(_steps, "make_stack", limited)
    alone, together, _ = step_seconds([conv(width=4, seed=seed) for seed in range(3)], splits)
    assert alone is not None
    assert together is None
    most = 0
    assert step_seconds([conv(width=4)], splits) == (None, None, None)


def test_a_convolutional_study_runs_to_its_end_in_the_stacks_that_were_timed_and_says_so_in_its_table(tmp_path: Path) -> None:
    shown: list[str] = []

    def run() -> None:
        with opened(tmp_path) as opened_store:
            study.run(grid(CONVOLUTIONS), CONVOLUTIONS, opened_store, None, progress=lambda stage, *_: shown.append(stage))

    run()
    assert list(dict.fromkeys(shown)) == ["timing", "tuning", "evaluation"]
    records = stored(tmp_path).values()
    with opened(tmp_path) as opened_store:
        sizes = Timings(opened_store).sizes
        assert json.loads(opened_store.get("timings") or "")
    assert {record.outcome.stack_size for record in records if record.trial.role == "evaluation"} <= {1, 5}
    assert all((record.outcome.stack_size == 1) == (sizes[shape_of(record.trial)] == 1) for record in records if record.trial.seed < 10)
    _, read_again, _ = from_frame(to_frame(list(records), "convolutions", CONVOLUTIONS))
    assert {record.provenance["timing"] for record in read_again} == {record.provenance["timing"] for record in records}
    before = results(tmp_path)
    run()
    assert results(tmp_path) == before


def test_splits_know_the_shape_of_an_image() -> None:
    splits: Splits = make_splits(load("digits"))
    assert splits.shape == (1, 8, 8)
    assert splits.train.inputs.shape[1] == 64
