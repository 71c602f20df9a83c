# A round's progress: what share of its work is done, and how long the study may still take.
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from makers import record, trial

from affine_divergence.cli import _progress
from affine_divergence.lab import rounds
from affine_divergence.lab.costs import nominal_seconds
from affine_divergence.lab.rounds import Round, Work
from affine_divergence.lab.store import Record, Store, opened
from affine_divergence.lab.timings import Timings
from affine_divergence.lab.worker import Progress, train_stack

SHORT, LONG = trial(width=8), trial(width=9, epochs=6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as store:
        store.begin([[SHORT], [LONG]])
        yield store


class Slow:
    """Two workers, whose tasks are reported half done once, and finish at the next look."""

    count = 2

    def __init__(self) -> None:
        self.tasks: dict[Future[list[Record]], tuple[Any, ...]] = {}
        self.looks = 0

    def submit(self, function: object, *arguments: Any) -> Future[list[Record]]:
        assert function is train_stack
        future: Future[list[Record]] = Future()
        self.tasks[future] = arguments
        return future

    def progress(self, future: Future[list[Record]]) -> Progress:
        self.looks += 1
        if self.looks == 4:  # each of two tasks twice
            for task, (stack, _) in self.tasks.items():
                task.set_result([record(one, cpu_seconds=3 * nominal_seconds(one)) for one in stack])
        return Progress(0.5, 1.5 * nominal_seconds(self.tasks[future][0][0]))


def test_work_is_shown_within_stacks_and_left_time_by_measured_cpu(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "INTERVAL", 0.01)
    shown: list[tuple[int, Work]] = []
    later = 10.0
    one = Round(store, Slow(), store.queue(), lambda *now: shown.append(now), Timings(store), later)  # type: ignore[arg-type]
    assert sum(map(len, one.run())) == 2
    short, long = nominal_seconds(SHORT), nominal_seconds(LONG)
    (finished, half), *_, (all_, end) = shown
    assert (finished, half.share) == (0, pytest.approx(0.5))
    # Three times as slow as estimated, on two workers.
    assert half.left == pytest.approx(((short + long) / 2 + later) * 3 / 2)
    assert (all_, end.share, end.left) == (2, pytest.approx(1.0), pytest.approx(later * 3 / 2))
    assert len(shown) <= 4


def test_each_stack_is_sent_with_how_many_make_one_model(store: Store) -> None:
    workers = Slow()
    workers.looks = 2
    list(Round(store, workers, store.queue(), lambda *_: None, Timings(store)).run())  # type: ignore[arg-type]
    assert sorted((stack[0].width, together) for stack, together in workers.tasks.values()) == [(8, 96), (9, 96)]


def test_plain_progress_shows_work_and_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 1.0, 2.0, 40.0, 50.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    with _progress.progress() as show:
        show("tuning", 0, 8, Work(0.0, None))
        show("tuning", 0, 8, Work(0.1, 90.0))  # too soon
        show("tuning", 2, 8, Work(0.3, 90.0))
        show("tuning", 2, 8, Work(0.6, 7000.0))
        show("timing", 1, 3, None)
    assert capsys.readouterr().err.splitlines() == [
        "tuning: 0 of 8 trials, 0 s",
        "tuning: 2 of 8 trials, 30 % of their work, about 90 s left of the study, 2 s",
        "tuning: 2 of 8 trials, 60 % of their work, about 1.9 h left of the study, 40 s",
        "timing: 1 of 3 shapes, 50 s",
    ]
