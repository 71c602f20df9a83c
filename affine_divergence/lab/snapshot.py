# A store that cannot be written to, read from a copy: SQLite would leave out what its log holds, or refuse to open it.
from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

from affine_divergence.lab.errors import BadInputError

TRIES, PAUSE = 10, 0.2


def copied(path: Path) -> sqlite3.Connection:
    """The database at `path` with the log beside it, as one moment saw them, in memory."""
    log = path.with_name(path.name + "-wal")
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TRIES):
            before = _signature(path, log)
            for file in (path, log):
                if file.exists():
                    shutil.copyfile(file, Path(folder) / file.name)
            if _signature(path, log) == before:
                break
            time.sleep(PAUSE)
        else:
            raise BadInputError(f"{path} changes while it is copied, and cannot be read in place: its folder is not yours to write to")
        memory = sqlite3.connect(":memory:", isolation_level=None)
        source = sqlite3.connect(Path(folder) / path.name)
        try:
            source.backup(memory)
        except BaseException:
            memory.close()
            raise
        finally:
            source.close()
    return memory


def _signature(*files: Path) -> list[tuple[int, int] | None]:
    return [(stat.st_size, stat.st_mtime_ns) if file.exists() and (stat := file.stat()) else None for file in files]
