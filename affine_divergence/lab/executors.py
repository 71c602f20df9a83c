# Where stacks are trained: spawned processes with one thread each, the data loaded once in each.
from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from affine_divergence.lab.errors import first_line
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Splits

# Of this worker process, from its start: a source file changed meanwhile is not what it runs.
_splits: Splits | None = None
_provenance: dict[str, str | int] = {}


@contextmanager
def processes(workers: int, data: str, path: Path | None, cache: Path | None) -> Iterator[Executor]:
    """An executor for `train_stack`; when the block is left by an exception, its processes are ended at once."""
    executor = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(data, path, cache)
    )
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    executor.shutdown()


def train_stack(trials: Sequence[Trial]) -> list[Record]:
    """Train trials together in this worker; a stack that raises gives failed trials with the reason."""
    from affine_divergence.lab.training import train

    if _splits is None:
        raise RuntimeError("train_stack runs in the workers of `processes`")
    try:
        outcomes = train(trials, _splits)
    except Exception as error:
        outcomes = [Outcome(status="failed", reason=f"{type(error).__name__}: {first_line(error)}")] * len(trials)
    return [Record(trial, outcome, _provenance) for trial, outcome in zip(trials, outcomes, strict=True)]


def _start(data: str, path: Path | None, cache: Path | None) -> None:
    global _splits, _provenance
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()
    import torch

    from affine_divergence.lab.data import load, make_splits
    from affine_divergence.lab.provenance import provenance
    from affine_divergence.lab.training import keep_freed_memory, train  # noqa: F401 (imported now, as the source digest says)

    keep_freed_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # activations of deep narrow nets shrink into denormals, which are slow
    _splits = make_splits(load(data, path, cache=cache))
    _provenance = provenance(_splits.digest)


def _end_with(parent: int | None) -> None:
    # A parent that was killed cannot end its workers, and they would train their stack to its end for nobody.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
