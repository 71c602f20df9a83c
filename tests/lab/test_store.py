# The store: what is in it comes back, whole stacks or nothing, one writer.
from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest
from makers import record, trial

from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.store import FILE, Record, opened, read


def test_records_come_back_as_they_were_also_after_reopening(tmp_path: Path) -> None:
    records = [record(trial(seed=s)) for s in range(3)] + [record(trial(seed=9, role="tuning"))]
    with opened(tmp_path) as store:
        store.add(records)
        store.put("study", "s")
    with read(tmp_path) as store:
        assert sorted(store.records(), key=lambda r: r.trial.seed) == records
        assert (store.get("study"), store.get("nothing")) == ("s", None)


def test_losses_that_are_not_finite_stay_what_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add([record(trial(), status="diverged", final_loss=math.nan, loss_curve=[math.inf, math.nan, -math.inf])])
        (back,) = store.records()
    assert back.outcome.final_loss is not None
    assert math.isnan(back.outcome.final_loss)
    assert str(back.outcome.loss_curve) == "[inf, nan, -inf]"


def test_a_trial_stored_again_replaces_the_first_and_is_not_there_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add([record(trial(), 0.1)])
        store.add([record(trial(), 0.2)])
        assert [r.outcome.validation_accuracy for r in store.records()] == [0.2]


def test_a_stack_that_cannot_be_stored_whole_is_not_stored_at_all(tmp_path: Path) -> None:
    broken = Record(trial(seed=1), record(trial()).outcome, {"threads": object()})  # type: ignore[dict-item]
    with opened(tmp_path) as store:
        with pytest.raises(TypeError):
            store.add([record(trial(seed=0)), broken])
        assert store.records() == []


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add([record(trial())])
        with pytest.raises(BadInputError, match=f"another run is writing to the store {tmp_path}"), opened(tmp_path):
            pass
        with read(tmp_path) as reader:
            assert len(reader.records()) == 1
    with opened(tmp_path):
        pass


def test_a_folder_without_a_store_a_file_that_is_none_and_a_newer_format_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no store"), read(tmp_path):
        pass
    (tmp_path / FILE).write_bytes(b"not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(BadInputError, match="cannot be used"), read(tmp_path):
        pass
    (tmp_path / FILE).unlink()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(BadInputError, match="store format 99"), opened(tmp_path):
        pass


def test_a_store_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match=r"cannot write to the store .*file/store"), opened(tmp_path / "file" / "store"):
        pass


def test_a_damaged_row_and_a_folder_in_the_files_place_are_bad_input(tmp_path: Path) -> None:
    for column, value in (("trial", "{"), ("trial", "{}"), ("outcome", "[")):
        with opened(tmp_path) as store:
            store.add([record(trial())])
            store._connection.execute(f"UPDATE trials SET {column} = ?", (value,))
            store._connection.commit()
        with pytest.raises(BadInputError, match="cannot be used"), read(tmp_path) as store:
            store.records()
    (tmp_path / "other" / FILE).mkdir(parents=True)
    with pytest.raises(BadInputError, match="cannot be used"), opened(tmp_path / "other"):
        pass


def test_a_store_that_fails_while_it_is_written_to_is_a_failure_not_bad_input(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add([record(trial(seed=0))])
    many = [record(trial(seed=seed)) for seed in range(1, 400)]

    def overflow() -> None:
        with opened(tmp_path) as store:
            store._connection.execute("PRAGMA max_page_count = 1")
            store.add(many)

    with pytest.raises(StudyFailedError, match="full"):
        overflow()
    with read(tmp_path) as store:
        assert [r.trial.seed for r in store.records()] == [0]
