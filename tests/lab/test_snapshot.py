# A store that cannot be written to is read with all that its log holds.
from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from makers import TINY, record, trial

from affine_divergence.lab import store as module
from affine_divergence.lab.store import FILE, opened, read


def test_what_only_the_log_of_a_killed_run_holds_is_read_from_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    with opened(tmp_path / "store") as results:
        results.put({"study": "tiny", "grid": TINY})
        results.add([record(trial(seed=seed)) for seed in range(3)])
        shutil.copytree(tmp_path / "store", killed)  # as kill -9 would leave it: the log is not yet in the file
    (killed / f"{FILE}-shm").unlink()
    assert (killed / f"{FILE}-wal").stat().st_size > 0
    monkeypatch.setattr(module.os, "access", lambda path, mode: mode != os.W_OK)
    with read(killed) as results:
        assert [r.trial.seed for r in sorted(results.records(), key=lambda r: r.trial.seed)] == [0, 1, 2]
    assert sorted(p.name for p in killed.iterdir()) == ["lock", FILE, f"{FILE}-wal"]
