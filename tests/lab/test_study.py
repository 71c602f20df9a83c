# A study from its grid to its store, in real worker processes.
from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from makers import TINY, TUNED, grid, trial

from affine_divergence.lab import study
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.store import FILE, opened
from affine_divergence.lab.tuning import plan


def run(text: str, folder: Path, workers: int = 1) -> list[tuple[str, int, int]]:
    shown: list[tuple[str, int, int]] = []
    with opened(folder) as store:
        study.run(grid(text), text, store, None, workers=workers, progress=lambda *now: shown.append(now))
    return shown


def scores(folder: Path) -> dict[str, tuple[object, ...]]:
    with opened(folder) as store:
        return {
            r.trial.key: (r.outcome.status, r.outcome.validation_accuracy, r.outcome.test_accuracy, *r.outcome.loss_curve)
            for r in store.records()
        }


def test_a_tuned_study_runs_to_its_end_with_the_same_result_in_one_process_or_two_and_is_not_run_again(tmp_path: Path) -> None:
    shown = run(TUNED, tmp_path / "two", workers=2)
    assert shown[0] == ("tuning", 0, 6)
    assert shown[-1] == ("evaluation", 4, 4)
    run(TUNED, tmp_path / "one")
    assert scores(tmp_path / "one") == scores(tmp_path / "two")
    assert run(TUNED, tmp_path / "two") == []
    with opened(tmp_path / "two") as store:
        records = store.records()
    assert plan(grid(TUNED), study.scores(records)).missing == []
    assert {r.trial.role for r in records if r.outcome.test_accuracy is not None} == {"evaluation"}
    assert all(r.provenance["threads"] == 1 and r.provenance["data_digest"] for r in records)


def test_what_a_store_lost_is_run_again_to_the_same_result_and_nothing_else_is(tmp_path: Path) -> None:
    run(TINY, tmp_path)
    before = scores(tmp_path)
    connection = sqlite3.connect(tmp_path / FILE)
    with connection:
        connection.execute("DELETE FROM trials WHERE json_extract(trial, '$.seed') = 1")
    connection.close()
    assert run(TINY, tmp_path)[-1] == ("evaluation", 4, 4)
    assert scores(tmp_path) == before


def test_a_grid_that_grew_runs_only_its_new_trials(tmp_path: Path) -> None:
    run(TINY, tmp_path)
    assert run(TINY.replace("[0, 1, 2]", "[0, 1, 2, 3]"), tmp_path)[0] == ("evaluation", 0, 4)


def test_a_store_of_another_study_or_of_other_images_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(TINY, tmp_path)
    with pytest.raises(BadInputError, match="this store holds the study tiny, not other"):
        run(TINY.replace('"tiny"', '"other"'), tmp_path)
    with opened(tmp_path) as store:
        store.put("data_digest", "0000")
    with pytest.raises(BadInputError, match="images with the digest 0000"):
        run(TINY, tmp_path)
    with opened(tmp_path) as store:
        assert (store.get("study"), store.get("grid")) == ("tiny", TINY)


def test_a_trial_that_fails_is_kept_with_its_reason_the_others_go_on_and_it_is_tried_again(tmp_path: Path) -> None:
    too_wide = TINY.replace("[8]", "[8, 100000000]")  # asks for more memory than there is
    for _ in range(2):
        with pytest.raises(StudyFailedError, match=r"12 trials failed, the first with: RuntimeError: .*memory"):
            run(too_wide, tmp_path)
        with opened(tmp_path) as store:
            records = store.records()
        assert {r.outcome.status for r in records if r.trial.width == 8} <= {"done", "diverged"}
        failed = [r.outcome for r in records if r.trial.width != 8]
        assert {(o.status, o.validation_accuracy) for o in failed} == {("failed", None)}
        assert all("memory" in (o.reason or "") for o in failed)


def test_no_stack_is_larger_than_the_limit_and_none_mixes_what_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "MAX_STACK", 4)
    trials = [trial(seed=s, learning_rate=0.1 * (r + 1)) for s in range(2) for r in range(9)]
    parts = study.stacks(trials)
    assert sorted(t.key for part in parts for t in part) == sorted(t.key for t in trials)
    assert all(len(part) <= 4 and len({t.shared for t in part}) == 1 for part in parts)
