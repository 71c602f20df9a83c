# The affdiv command as a process of its own: started, looked at, ended; and what is in its store but times.
from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from affine_divergence.lab.store import Record, read

AFFDIV = [sys.executable, "-c", "from affine_divergence.cli.main import main; main()"]

# The command with workers that start at once and train nothing, since it is not the training that is tested: their results
# tell the size of the stack. Workers run a script's top level as well, so it may spoil them: `before(trials)` is called first.
PRETENDING = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from affine_divergence.lab import worker
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.store import Record

def before(trials):
    pass

def train_stack(trials, together=None):
    before(trials)
    curve = [float(len(trials))] * 100
    return [Record(t, Outcome("done", t.learning_rate / 2, stack_size=len(trials), loss_curve=curve), {}) for t in trials]

train_stack.__module__ = worker.__name__
worker.train_stack = train_stack
worker._start = lambda setup: None
from affine_divergence.lab import study  # now: it imports train_stack
study.load = lambda *_, **__: SimpleNamespace(digest="images")
"""
PRETENDED = """
if __name__ == "__main__":
    from affine_divergence.cli.main import main
    main()
"""


def pretending(folder: Path, spoiled: str = "") -> list[str]:
    """The command with such workers, for `affdiv` and `started`."""
    (folder / "pretending.py").write_text(PRETENDING + spoiled + PRETENDED)
    return [sys.executable, "pretending.py"]


def affdiv(folder: Path, *arguments: str, command: list[str] = AFFDIV) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@contextmanager
def started(folder: Path, *arguments: str, command: list[str] = AFFDIV) -> Iterator[subprocess.Popen[str]]:
    """A command running in a process group of its own, which is empty in the end."""
    with subprocess.Popen([*command, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            for member in group(process.pid):
                os.kill(member, 9)


def wait_for(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line on standard error that holds the pattern."""
    assert process.stderr is not None
    lines = []
    while True:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
        if found := re.search(pattern, lines[-1]):
            return found


def group(leader: int) -> list[int]:
    """The processes of a process group that have not ended."""
    return [pid for pid, state, pgrp in _processes() if pgrp == leader and state != "Z"]


def workers(leader: int) -> list[int]:
    """The worker processes of a process group."""
    return [pid for pid in group(leader) if b"spawn_main" in _command_line(pid)]


def until(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took until the condition held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - start


def stored(folder: Path) -> dict[str, Record]:
    with read(folder) as store:
        return {record.trial.key: record for record in store.records()}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Everything of every trial that does not depend on when it ran: equal means equal to the last bit."""
    return {key: asdict(replace(record.outcome, wall_seconds=None, cpu_seconds=None)) for key, record in stored(folder).items()}


def _processes() -> Iterator[tuple[int, str, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        yield int(stat.parent.name), state, int(pgrp)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
