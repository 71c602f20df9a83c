# The store: one SQLite file in a folder, one writer, one transaction for a finished stack.
from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from affine_divergence.lab.errors import BadInputError, StudyFailedError, first_line
from affine_divergence.lab.grid import Grid, grid_of
from affine_divergence.lab.interrupts import heard, sheltered
from affine_divergence.lab.lock import locked
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.snapshot import copied
from affine_divergence.lab.trial import Trial

FORMAT = 2
READABLE = (1, FORMAT)  # 1 lacks the queue; it gets one when it is next written to
FILE = "store.sqlite"
PATIENCE = 30.0  # seconds to wait for another program that writes to the file

TABLES = (
    "CREATE TABLE IF NOT EXISTS study (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS trials (key TEXT PRIMARY KEY, status TEXT NOT NULL, trial TEXT NOT NULL, "
    "outcome TEXT NOT NULL, provenance TEXT NOT NULL)",
    # The stacks of the present round: a trial's last bits depend on its stack, so a run that goes on must train the same ones.
    "CREATE TABLE IF NOT EXISTS queue (place INTEGER PRIMARY KEY, running INTEGER NOT NULL, trials TEXT NOT NULL)",
)


@dataclass(frozen=True)
class Record:
    """A trial, how it ended, and what it ran on."""

    trial: Trial
    outcome: Outcome
    provenance: Mapping[str, str | int]


@dataclass(frozen=True)
class Queued:
    """A stack of the present round, at its place in the queue."""

    place: int
    trials: tuple[Trial, ...]
    running: bool = False


class Store:
    """Results by key, and the stacks to train next. Open one with `opened` to write, or `read` to look."""

    def __init__(self, connection: sqlite3.Connection, path: Path, version: int = FORMAT) -> None:
        self._connection = connection
        self._path = path
        self._version = version

    def get(self, name: str) -> str | None:
        """A value of the study as a whole: its name, grid file, data digest, the path of its data."""
        row = self._connection.execute("SELECT value FROM study WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, values: Mapping[str, str], *, forget_queue: bool = False) -> None:
        """Set values of the study; a queue that was planned for another grid is to be forgotten with them."""
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO study VALUES (?, ?)", list(values.items()))
            if forget_queue:
                self._connection.execute("DELETE FROM queue")

    def add(self, records: Sequence[Record], *, running: Collection[int] = ()) -> None:
        """All of a stack's records, or none of them; and the places in the queue of the stacks that are trained from now on."""
        rows = [
            (
                record.trial.key,
                record.outcome.status,
                record.trial.model_dump_json(),
                json.dumps(asdict(record.outcome)),  # not null but NaN and Infinity where a loss is so
                json.dumps(dict(record.provenance), sort_keys=True),
            )
            for record in records
        ]
        with self._transaction():
            self._connection.executemany("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)", rows)
            self._connection.execute("UPDATE queue SET running = 0 WHERE running")
            self._connection.executemany("UPDATE queue SET running = 1 WHERE place = ?", [(place,) for place in running])

    def records(self) -> list[Record]:
        """Everything stored, in the order of the keys."""
        rows = self._connection.execute("SELECT trial, outcome, provenance FROM trials ORDER BY key")
        return [
            Record(Trial.model_validate_json(trial), Outcome(**json.loads(outcome)), json.loads(provenance))
            for trial, outcome, provenance in rows
        ]

    def trials(self) -> Iterator[Trial]:
        """The stored trials without their outcomes, and those of the present round."""
        for (trial,) in self._connection.execute("SELECT trial FROM trials"):
            yield Trial.model_validate_json(trial)
        for queued in self.queue():
            yield from queued.trials

    def begin(self, stacks: Sequence[Sequence[Trial]]) -> None:
        """The stacks of a round, in place of those of the round before."""
        with self._transaction():
            self._connection.execute("DELETE FROM queue")
            self._enqueue(stacks)

    def split(self, place: int, parts: Sequence[Sequence[Trial]]) -> list[Queued]:
        """Parts in place of a stack of the queue."""
        with self._transaction():
            self._connection.execute("DELETE FROM queue WHERE place = ?", (place,))
            (last,) = self._connection.execute("SELECT coalesce(max(place), 0) FROM queue").fetchone()
            self._enqueue(parts)
        return [queued for queued in self.queue() if queued.place > last]

    def queue(self) -> list[Queued]:
        """The stacks of the present round, finished ones too."""
        if self._version == 1:
            return []
        rows = self._connection.execute("SELECT place, trials, running FROM queue ORDER BY place")
        return [Queued(place, _trials(text), bool(running)) for place, text, running in rows]

    def _enqueue(self, stacks: Sequence[Sequence[Trial]]) -> None:
        rows = [("[" + ",".join(trial.model_dump_json() for trial in stack) + "]",) for stack in stacks]
        self._connection.executemany("INSERT INTO queue (running, trials) VALUES (0, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with sheltered(), _transaction(self._connection, self._path):
            yield


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The folder's store for writing, made where there is none; refused while another run writes to it."""
    with locked(folder), _connected(folder / FILE) as store:
        yield store


@contextmanager
def read(folder: Path) -> Iterator[Store]:
    """The folder's store for reading, also while a run writes to it."""
    if not (folder / FILE).is_file():
        raise BadInputError(f"{folder} holds no store (no {FILE}); give the folder that `affdiv run --store` wrote to")
    with _connected(folder / FILE, writing=False) as store:
        yield store


def study_of(store: Store, folder: Path) -> tuple[Grid, str]:
    """The grid that a store was last run for, checked, and its text."""
    text = store.get("grid")
    if text is None:
        raise BadInputError(f"the store {folder} is empty; run a study into it first")
    return grid_of(text, f"the grid in {folder}", store.trials()), text


@contextmanager
def _connected(path: Path, *, writing: bool = True) -> Iterator[Store]:
    store = None
    try:
        store = _prepared(path, writing)
        yield store
    except sqlite3.OperationalError as error:
        if store is None and not _full(error):
            raise BadInputError(f"the store {path} cannot be used: {error}") from error
        way_out = "make room on its disk" if _full(error) else "see to its disk"
        raise StudyFailedError(f"the store {path} failed: {error}; what was finished before is stored: {way_out}") from error
    except (sqlite3.DatabaseError, ValidationError, json.JSONDecodeError) as error:
        raise BadInputError(f"the store {path} cannot be used: {first_line(error)}") from error
    finally:
        if store is not None:
            store._connection.close()


def _prepared(path: Path, writing: bool) -> Store:
    if writing or os.access(path.parent, os.W_OK):
        uri = path.resolve().as_uri() + ("" if writing else "?mode=ro")
        connection = sqlite3.connect(uri, timeout=1.0, uri=True, isolation_level=None)
    else:
        connection = copied(path)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not writing:
            raise BadInputError(f"the store {path} is empty; run a study into it first")
        if version not in (0, *READABLE):
            readable = " and ".join(map(str, READABLE))
            raise BadInputError(f"{path} has the store format {version}, this version reads {readable}; use another folder")
        if writing:
            if version == 0:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if version < FORMAT:
                with _transaction(connection, path):
                    for table in TABLES:
                        connection.execute(table)
                    connection.execute(f"PRAGMA user_version = {FORMAT}")
                version = FORMAT
    except BaseException:
        connection.close()
        raise
    return Store(connection, path, version)


@contextmanager
def _transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    _begin(connection, path)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _begin(connection: sqlite3.Connection, path: Path) -> None:
    # Each try waits a second in SQLite, where no signal is heard; an interruption is given two more seconds to store what is finished.
    start = time.monotonic()
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            waited = time.monotonic() - start
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            if waited >= PATIENCE or (heard() and waited >= 2.0):
                raise StudyFailedError(
                    f"another program has been writing to the store {path} for {waited:.0f} s; what was finished before is stored: "
                    "close that program"
                ) from error


def _full(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _trials(text: str) -> tuple[Trial, ...]:
    return tuple(Trial.model_validate(values) for values in json.loads(text))
