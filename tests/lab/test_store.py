# The store: what is in it comes back, whole stacks or nothing, one writer.
from __future__ import annotations

import fcntl
import math
import os
import socket
import sqlite3
import threading
from pathlib import Path

import pytest
from makers import record, trial

from affine_divergence.lab import lock
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.store import FILE, Record, opened, read


def test_records_come_back_as_they_were_also_after_reopening(tmp_path: Path) -> None:
    records = [record(trial(seed=s)) for s in range(3)] + [record(trial(seed=9, role="tuning"))]
    with opened(tmp_path) as store:
        store.add(records)
        store.put({"study": "s"})
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
        assert lock.holder(tmp_path) is not None
        said = rf"another run is writing to the store {tmp_path}: process {os.getpid()} on {socket.gethostname()}, since \d{{4}}-"
        with pytest.raises(BadInputError, match=said), opened(tmp_path):
            pass
        with read(tmp_path) as reader:
            assert len(reader.records()) == 1
    assert lock.holder(tmp_path) is None
    with opened(tmp_path):
        pass


def test_a_look_at_the_holder_of_the_lock_refuses_no_run(tmp_path: Path) -> None:
    with (tmp_path / lock.FILE).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.15, looking.close).start()
        with opened(tmp_path):
            pass


def test_a_queue_is_what_was_begun_with_its_parts_where_a_stack_was_split_and_what_runs_now(tmp_path: Path) -> None:
    one, two, three = ((trial(seed=s), trial(seed=s + 1)) for s in (0, 2, 4))
    with opened(tmp_path) as store:
        store.begin([one])
        store.begin([two, three])
        first, second = store.queue()
        assert (first.trials, second.trials) == (two, three)
        store.add([], running=[second.place])
        parts = store.split(first.place, [two[:1], two[1:]])
        store.add([record(two[0])])
        store.add([], running=[parts[1].place, second.place])
    with read(tmp_path) as store:
        assert {(q.trials, q.running) for q in store.queue()} == {(three, True), (two[:1], False), (two[1:], True)}


def test_another_program_that_writes_is_waited_for_and_given_up_in_the_end_with_nothing_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(1.3, other.execute, ["ROLLBACK"]).start()
        store.add([record(trial(seed=0))])
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr("affine_divergence.lab.store.PATIENCE", 0.5)
        with pytest.raises(StudyFailedError, match="another program has been writing to the store"):
            store.add([record(trial(seed=1))])
        other.execute("ROLLBACK")
        other.close()
        store.add([record(trial(seed=2))])
        assert {r.trial.seed for r in store.records()} == {0, 2}


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
    with pytest.raises(BadInputError, match="store format 99, this version reads 1 and 2"), opened(tmp_path):
        pass
    (tmp_path / FILE).write_bytes(b"")
    with pytest.raises(BadInputError, match="is empty; run a study into it first"), read(tmp_path):
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
