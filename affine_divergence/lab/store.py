# The store: one SQLite file in a folder, one writer, one transaction for a finished stack.
from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from affine_divergence.lab.errors import BadInputError, StudyFailedError, first_line
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.trial import Trial

FORMAT = 1
FILE = "store.sqlite"


@dataclass(frozen=True)
class Record:
    """A trial, how it ended, and what it ran on."""

    trial: Trial
    outcome: Outcome
    provenance: Mapping[str, str | int]


class Store:
    """Results by key. Open one with `opened` to write, or `read` to look."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> str | None:
        """A value of the study as a whole: its name, grid file, data digest."""
        row = self._connection.execute("SELECT value FROM study WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, name: str, value: str) -> None:
        with self._connection:
            self._connection.execute("INSERT OR REPLACE INTO study VALUES (?, ?)", (name, value))

    def add(self, records: Sequence[Record]) -> None:
        """All of a stack's records, or none of them."""
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
        with self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?)", rows)

    def records(self) -> list[Record]:
        """Everything stored, in the order of the keys."""
        rows = self._connection.execute("SELECT trial, outcome, provenance FROM trials ORDER BY key")
        return [
            Record(Trial.model_validate_json(trial), Outcome(**json.loads(outcome)), json.loads(provenance))
            for trial, outcome, provenance in rows
        ]


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The folder's store for writing, made where there is none; refused while another run writes to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise BadInputError(f"cannot write to the store {folder}: {error.strerror}; name another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInputError(f"another run is writing to the store {folder}; wait for it, or name another folder") from error
        with _connected(folder / FILE) as connection:
            yield Store(connection)


@contextmanager
def read(folder: Path) -> Iterator[Store]:
    """The folder's store for reading, also while a run writes to it."""
    if not (folder / FILE).is_file():
        raise BadInputError(f"{folder} holds no store (no {FILE}); give the folder that `affdiv run --store` wrote to")
    with _connected(folder / FILE, writing=False) as connection:
        yield Store(connection)


@contextmanager
def _connected(path: Path, *, writing: bool = True) -> Iterator[sqlite3.Connection]:
    connection = None
    try:
        connection = _prepared(path, writing)
        yield connection
    except sqlite3.OperationalError as error:
        if connection is None:
            raise BadInputError(f"the store {path} cannot be used: {error}") from error
        raise StudyFailedError(f"the store {path} failed: {error}; what was finished before is stored") from error
    except (sqlite3.DatabaseError, ValidationError, json.JSONDecodeError) as error:
        raise BadInputError(f"the store {path} cannot be used: {first_line(error)}") from error
    finally:
        if connection is not None:
            connection.close()


def _prepared(path: Path, writing: bool) -> sqlite3.Connection:
    readable = path.resolve().as_uri() + "?mode=ro"
    # In a folder that cannot be written to SQLite can read only what it is told will not change.
    uri = path.resolve().as_uri() if writing else readable if os.access(path.parent, os.W_OK) else readable + "&immutable=1"
    connection = sqlite3.connect(uri, timeout=30.0, uri=True)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and writing:
            connection.execute("PRAGMA journal_mode = WAL")
            with connection:
                connection.execute("CREATE TABLE IF NOT EXISTS study (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS trials (key TEXT PRIMARY KEY, status TEXT NOT NULL, trial TEXT NOT NULL, "
                    "outcome TEXT NOT NULL, provenance TEXT NOT NULL)"
                )
                connection.execute(f"PRAGMA user_version = {FORMAT}")
        elif version != FORMAT:
            raise BadInputError(f"{path} has the store format {version}, this version reads {FORMAT}; use another folder")
        if writing:
            connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection
