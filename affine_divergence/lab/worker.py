# A worker process: loads the data once, then trains the stacks it is sent, with one thread.
from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from affine_divergence.lab.errors import BadInputError, first_line
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import Trial

if TYPE_CHECKING:
    from affine_divergence.lab.data import Splits


@dataclass(frozen=True)
class Setup:
    """What a worker is started with: the data's name, where it lies, where it is cached, and the device to train on."""

    data: str
    path: Path | None = None
    cache: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Progress:
    """The share of a task's work that is done, and the CPU seconds that it took; sent any number of times before the answer."""

    share: float
    cpu_seconds: float


class AllocationError(RuntimeError):
    """There was not the memory for a stack."""


# Of this worker process, from its start: a source file changed meanwhile is not what it runs.
_splits: Splits | None = None
_device = "cpu"
_provenance: dict[str, str | int] = {}
_connection: Connection | None = None
INTERVAL = 0.5  # seconds between two reports of progress at least


def serve(connection: Connection, setup: Setup) -> None:
    """Send None when ready, or what prevented it; then answer each (function, arguments) with (result, exception).

    Before an answer, `Progress` may come.
    """
    global _connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()
    try:
        _start(setup)
    except Exception as error:
        connection.send(_portable(error))
        return
    connection.send(None)
    _connection = connection
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            result, raised = function(*arguments), None
        except Exception as error:
            result, raised = None, _portable(error)
        connection.send((result, raised))


def train_stack(trials: Sequence[Trial], together: int | None = None) -> list[Record]:
    """Train trials together in this worker; a stack that raises gives failed trials with the reason.

    At most `together` of them are one batched model. Reports progress. Raises AllocationError where a smaller stack may fit.
    """
    import torch

    from affine_divergence.lab.training import train

    if _splits is None:
        raise RuntimeError("train_stack runs in a worker, which has loaded the data")
    torch.set_flush_denormal(True)  # activations of deep narrow nets shrink into denormals, which are slow; a setting of the thread
    try:
        outcomes = train(trials, _splits, _device, together=together, report=_reporter())
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        if _lacks_memory(error):
            raise AllocationError(reason) from None
        outcomes = [Outcome(status="failed", reason=reason)] * len(trials)
    return [Record(trial, outcome, _provenance) for trial, outcome in zip(trials, outcomes, strict=True)]


def time_step(trials: Sequence[Trial]) -> tuple[float | None, float | None, float | None]:
    """Median CPU seconds of one of these trials: of a step trained alone, of a step all together, and of the evaluation of an image.

    None for what cannot be trained.
    """
    import torch

    from affine_divergence.lab.benchmarks import step_seconds

    if _splits is None:
        raise RuntimeError("time_step runs in a worker, which has loaded the data")
    torch.set_flush_denormal(True)
    return step_seconds(trials, _splits, _device)


def _reporter() -> Callable[[float], None]:
    # Not after every step, which may take microseconds.
    last, start = time.monotonic(), time.process_time()

    def report(share: float) -> None:
        nonlocal last
        if _connection is not None and time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            _connection.send(Progress(share, time.process_time() - start))

    return report


def _start(setup: Setup) -> None:
    global _splits, _device, _provenance
    import torch

    from affine_divergence.lab.data import load, make_splits
    from affine_divergence.lab.provenance import provenance
    from affine_divergence.lab.training import keep_freed_memory, train  # noqa: F401 (imported now, as the source digest says)

    keep_freed_memory()
    torch.set_num_threads(1)
    _splits = make_splits(load(setup.data, setup.path, cache=setup.cache))
    _device = setup.device
    _provenance = provenance(_splits.digest, _device)


def _lacks_memory(error: Exception) -> bool:
    import torch

    said = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in said or "can't allocate memory" in said)
    )


def _portable(error: Exception) -> Exception:
    # Others' exceptions may not survive pickling, ours with one message do.
    if type(error) in (BadInputError, AllocationError):
        return error
    return RuntimeError(f"{type(error).__name__}: {first_line(error)}")


def _end_with(parent: int | None) -> None:
    # A parent that was killed cannot end its workers, and they would train their stack to its end for nobody.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
