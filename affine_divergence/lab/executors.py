# Where stacks are trained: spawned processes, each with a thread here that knows what it was given and replaces it when it dies.
#
# Not concurrent.futures.ProcessPoolExecutor: one dead worker breaks the whole pool without saying which task it had, and a pool waits
# for ever for the rest of a result whose sender was killed, because it holds the sending end of the pipe itself.
from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from affine_divergence.lab.interrupts import blocked, sheltered
from affine_divergence.lab.worker import Progress, Setup, serve

P = ParamSpec("P")
T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """A worker process ended while it had a task."""


class WorkerNotStartedError(RuntimeError):
    """A worker process ended before it could take a task."""


@dataclass(frozen=True)
class _Task:
    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Workers(Executor):
    """An executor of `count` processes, each started when it has something to do; a dead one costs its own task alone."""

    def __init__(self, count: int, setup: Setup) -> None:
        self.count = count
        self._setup = setup
        self._context = multiprocessing.get_context("spawn")
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()  # a process is not started while all are being ended
        self._ended = False
        self._processes: set[SpawnProcess] = set()
        self._progress: dict[Future[Any], Progress] = {}
        with blocked():
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
            for thread in self._threads:
                thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if kwargs:
            raise TypeError("tasks of the workers take positional arguments")
        future: Future[T] = Future()
        self._tasks.put(_Task(future, fn, args))
        return future

    def progress(self, future: Future[Any]) -> Progress:
        """How far a running task is, as its worker last reported."""
        return self._progress.get(future, Progress(0.0, 0.0))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers: after their tasks, or at once if not to wait."""
        if wait and not cancel_futures:
            for _ in self._threads:
                self._tasks.put(None)
            for thread in self._threads:
                thread.join()
        with sheltered():
            with self._lock:
                self._ended = True
                for process in self._processes:
                    process.kill()
            for process in self._processes:
                process.join(timeout=2.0)

    def _work(self) -> None:
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None and not self._ended:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None or not worker.process.is_alive():
                    worker = self._hire()
                task.future.set_result(worker.answer(task, self._progress))
            except Exception as error:
                task.future.set_exception(error)
            finally:
                self._progress.pop(task.future, None)

    def _hire(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        with self._lock, theirs:  # our copy of its end is closed, or its death would not be the end of the pipe
            if self._ended:
                raise WorkerNotStartedError("the workers are being ended")
            process = self._context.Process(target=serve, args=(theirs, self._setup), daemon=True)
            try:
                process.start()
            except OSError as error:
                raise WorkerNotStartedError(f"no process could be started: {error}") from error
            self._processes = {known for known in self._processes if known.is_alive()} | {process}
        try:
            prevented = ours.recv()
        except (EOFError, OSError):
            raise WorkerNotStartedError(f"a worker process died while it loaded the data ({_ending(process)})") from None
        if prevented is not None:
            raise prevented
        return _Worker(process, ours)


@dataclass(frozen=True)
class _Worker:
    process: SpawnProcess
    connection: Connection

    def answer(self, task: _Task, progress: dict[Future[Any], Progress]) -> Any:
        try:
            self.connection.send((task.function, task.arguments))
            while isinstance(message := self.connection.recv(), Progress):
                progress[task.future] = message
            result, error = message
        except (EOFError, OSError):
            raise WorkerDiedError(f"its worker process died ({_ending(self.process)}), perhaps for lack of memory") from None
        if error is not None:
            raise error
        return result


@contextmanager
def processes(workers: int, setup: Setup) -> Iterator[Workers]:
    """Workers for `train_stack`; when the block is left by an exception, they are ended at once."""
    executor = Workers(workers, setup)
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False)
        raise
    executor.shutdown()


def _ending(process: SpawnProcess) -> str:
    process.join(timeout=2.0)
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
