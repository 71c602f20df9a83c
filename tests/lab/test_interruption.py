# A run that is interrupted or killed leaves no process behind, keeps what is finished, and goes on from there.
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from makers import TINY

from affine_divergence.lab.store import read

LONG = TINY.replace("epochs = 2", "epochs = 150").replace("[0.03, 0.3]", "[0.03]")
AFFDIV = [sys.executable, "-c", "from affine_divergence.cli.main import main; main()"]
COMMAND = [*AFFDIV, "run", "grid.toml", "--store", "store", "--workers", "1"]


def group(leader: int) -> list[int]:
    """The processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_run_and_the_store_goes_on(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(LONG)
    with subprocess.Popen(COMMAND, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stderr is not None
        while "2 of 6 trials" not in run.stderr.readline():
            assert run.poll() is None
        if how == signal.SIGINT:
            os.killpg(run.pid, how)  # as a terminal does on Ctrl-C
        else:
            run.send_signal(how)
        run.wait(timeout=10)
        until = time.monotonic() + 10
        while group(run.pid) and time.monotonic() < until:
            time.sleep(0.1)
        assert group(run.pid) == []
        if how == signal.SIGINT:
            assert run.returncode == 130
            assert run.stderr.read().splitlines()[-1].startswith("affdiv: interrupted")
    with read(tmp_path / "store") as store:
        finished = len(store.records())
    assert 2 <= finished < 6
    again = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"evaluation: 0 of {6 - finished} trials" in again.stderr
