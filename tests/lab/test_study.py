# A study from its grid to its store, in real worker processes.
from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from makers import STUDY, TINY, grid, trial
from running import results, stored

from affine_divergence.lab import stacks, study
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.store import FILE, opened
from affine_divergence.lab.tuning import plan


def run(text: str, folder: Path, workers: int = 1) -> list[tuple[str, int, int]]:
    shown: list[tuple[str, int, int]] = []
    with opened(folder) as store:
        study.run(grid(text), text, store, None, workers=workers, progress=lambda *now: shown.append(now[:3]))
    return shown


@pytest.fixture
def store(tmp_path: Path, undisturbed: Path) -> Path:
    return Path(shutil.copytree(undisturbed, tmp_path / "store"))


def test_a_tuned_study_runs_to_its_end_and_is_not_run_again(store: Path) -> None:
    records = list(stored(store).values())
    assert plan(grid(STUDY), study.scores(records)).missing == []
    assert {r.trial.role for r in records if r.outcome.test_accuracy is not None} == {"evaluation"}
    assert all(r.provenance["threads"] == 1 and r.provenance["data_digest"] for r in records)
    assert run(STUDY, store) == []


def test_what_a_store_lost_is_run_again_to_the_same_result_and_nothing_else_is(store: Path) -> None:
    before = results(store)
    connection = sqlite3.connect(store / FILE)
    with connection:
        connection.execute("DELETE FROM trials WHERE json_extract(trial, '$.width') = 5 AND json_extract(trial, '$.role') = 'evaluation'")
    connection.close()
    assert len(results(store)) == len(before) - 4
    assert run(STUDY, store) == [("evaluation", 0, 4), ("evaluation", 4, 4)]
    assert results(store) == before


def test_a_store_of_another_study_or_of_other_images_is_refused_and_left_alone(store: Path) -> None:
    with pytest.raises(BadInputError, match="this store holds the study faults, not other"):
        run(STUDY.replace('"faults"', '"other"'), store)
    with opened(store) as results_:
        results_.put({"data_digest": "0000"})
    with pytest.raises(BadInputError, match="images with the digest 0000"):
        run(STUDY, store)
    with opened(store) as results_:
        assert (results_.get("study"), results_.get("grid")) == ("faults", STUDY)


def test_a_round_that_was_begun_is_finished_as_planned_and_a_grid_that_changed_is_planned_anew(store: Path) -> None:
    with opened(store) as results_:
        (first, second, third) = results_.queue()  # of the last round
        results_.begin([first.trials[:1], first.trials[1:], second.trials, third.trials])
    connection = sqlite3.connect(store / FILE)
    with connection:
        connection.executemany("DELETE FROM trials WHERE key = ?", [(t.key,) for t in first.trials])
    connection.close()
    copy = Path(shutil.copytree(store, store.with_name("copy")))
    spaced = STUDY.replace(" = ", "=")
    assert run(spaced, store)[0] == ("evaluation", 0, 4)
    assert [stored(store)[t.key].outcome.stack_size for t in first.trials] == [1, 3, 3, 3]
    with opened(copy) as results_:
        extended = STUDY.replace("[0, 1]", "[0, 1, 2]")
        assert results_.queue() != []
        study._bind(results_, grid(extended), extended, None, results_.get("data_digest") or "")
        assert results_.queue() == []


def test_a_trial_that_fails_is_kept_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    too_wide = TINY.replace("[8]", "[8, 100000000]")  # asks for more memory than there is
    with pytest.raises(StudyFailedError, match=r"12 trials failed, the first with: RuntimeError: .*memory"):
        run(too_wide, tmp_path)
    records = stored(tmp_path).values()
    assert {r.outcome.status for r in records if r.trial.width == 8} <= {"done", "diverged"}
    failed = [r.outcome for r in records if r.trial.width != 8]
    assert {(o.status, o.validation_accuracy) for o in failed} == {("failed", None)}
    assert all("memory" in (o.reason or "") for o in failed)


def test_no_stack_is_larger_than_the_limit_and_none_mixes_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_STACK", 4)
    trials = [trial(seed=s, learning_rate=0.1 * (r + 1), width=w) for w in (8, 9) for s in range(2) for r in range(9)]
    parts = stacks.stacks(trials)
    assert sorted(t.key for part in parts for t in part) == sorted(t.key for t in trials)
    assert all(len(part) <= 4 and len({t.shared for t in part}) == 1 for part in parts)
    assert [stacks.turn(part) for part in parts] == sorted(stacks.turn(part) for part in parts)
    assert all(len(half) == 2 for half in stacks.halves(parts[0]))


def test_a_table_that_is_refused_leaves_grid_and_queue_as_they_were(store: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    with opened(store) as results_:
        results_.begin([[trial()]])
        extended = STUDY.replace("[0, 1]", "[0, 1, 2]")
        with pytest.raises(BadInputError, match="as Parquet"):
            study.run(grid(extended), extended, results_, None, table=tmp_path / "damaged.parquet", progress=lambda *_: None)
        assert (results_.get("grid"), [q.trials for q in results_.queue()]) == (STUDY, [(trial(),)])
