# The lock on a store: one coordinator at a time, and who it is.
from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from affine_divergence.lab.errors import BadInputError

FILE = "lock"
_TRIES, _PAUSE = 5, 0.1  # `holder` takes the lock for an instant, which must not refuse a run that starts just then


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; refused, with the holder's name, where another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write to the store {folder}: {error.strerror}; name another folder") from error
    with file:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not left:
                    said = f"another run is writing to the store {folder}: {_holder(file)}; wait for it, or name another folder"
                    raise BadInputError(said) from error
                time.sleep(_PAUSE)
        _sign(file)
        yield


def holder(folder: Path) -> str | None:
    """The name of the process that holds the folder's lock now, None where none does."""
    try:
        with (folder / FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(file)
    except OSError:
        pass
    return None


def _sign(file: IO[str]) -> None:
    with suppress(OSError):  # on a full disk the lock holds without a name
        file.seek(0)
        file.truncate()
        started = datetime.now().astimezone().isoformat(" ", "seconds")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (ValueError, LookupError, TypeError):
        return "a process that did not leave its name"
