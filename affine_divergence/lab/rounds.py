# A round: the stacks of the store's queue are trained until each trial is stored, with its scores or with the reason why not.
from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import NamedTuple

from affine_divergence.lab.errors import BadInputError, StudyFailedError, first_line
from affine_divergence.lab.executors import WorkerDiedError, WorkerNotStartedError, Workers
from affine_divergence.lab.interrupts import sheltered
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.stacks import Stack, halves, together, turn
from affine_divergence.lab.store import Queued, Record, Store
from affine_divergence.lab.timings import Timings
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.worker import AllocationError, train_stack

INTERVAL = 1.0  # seconds between two looks at the workers' progress
STARTS = 3  # workers that die while they load the data, one after the other, before that is the study's end


class Work(NamedTuple):
    """How much of a round's work is done, and the seconds until the study ends, where that can be estimated.

    The estimate is the expected CPU time of all that is left, corrected by the CPU time that was measured in this round.
    """

    share: float
    left: float | None


def unfinished(store: Store, finished: Collection[Trial]) -> list[Queued]:
    """The stacks of the queue with what is not finished of them: nothing that is stored is trained again."""
    rest = [(queued.place, tuple(t for t in queued.trials if t not in finished)) for queued in store.queue()]
    return [Queued(place, trials) for place, trials in rest if trials]


class Round:
    """Trains stacks in their turn, no more at a time than there are workers, so that the store can tell which ones run.

    A stack whose worker died is tried once more as it was, since a kill from outside must not change its last bits; the second time,
    or if it did not fit into memory, each half is tried. A single trial is then stored as failed.
    """

    def __init__(
        self,
        store: Store,
        workers: Workers,
        stacks: Collection[Queued],
        show: Callable[[int, Work], None],
        timings: Timings,
        later: float = 0.0,
    ) -> None:
        self._store = store
        self._timings = timings
        self._later = later  # estimated CPU seconds of the study's other trials
        self._workers = workers
        self._show = show
        self._waiting: list[tuple[tuple[int, float], int, Stack]] = []
        self._running: dict[Future[list[Record]], tuple[int, Stack]] = {}
        self._deaths: Counter[int] = Counter()
        self._failed_starts = 0
        self._all, self._over, self._measured = 0.0, 0.0, 0.0  # CPU seconds: estimated, those of finished trials, what these took
        self._shown: tuple[int, float] | None = None
        for queued in stacks:
            self._all += self._estimate(queued.trials)
            self._push(queued.place, queued.trials)

    def run(self) -> Iterator[list[Record]]:
        """The records of each stack as it is stored."""
        finished = 0
        self._feed()
        self._store.add([], running=self._places())
        while self._running:
            done, _ = wait(self._running, timeout=INTERVAL, return_when=FIRST_COMPLETED)
            self._look(finished)
            for future in done:
                with sheltered():
                    place, stack = self._running.pop(future)
                    records = self._records(future, place, stack)
                    self._feed()
                    self._store.add(records, running=self._places())
                finished += len(records)
                self._over += self._estimate([record.trial for record in records])
                self._measured += sum(record.outcome.cpu_seconds or 0.0 for record in records)
                self._look(finished)
                yield records

    def rescue(self) -> None:
        """Store what was finished when something else ended the round."""
        for future in list(self._running):
            if future.done() and future.exception() is None:
                self._store.add(self._with_said(future.result()))

    def work(self) -> Work:
        """What is done now."""
        running = [(self._workers.progress(future), self._estimate(stack)) for future, (_, stack) in self._running.items()]
        done = self._over + sum(progress.share * estimate for progress, estimate in running)
        measured = self._measured + sum(progress.cpu_seconds for progress, _ in running)
        left = self._all - done + self._later
        return Work(done / self._all, left * measured / done / self._workers.count if measured else None)

    def _look(self, finished: int) -> None:
        work = self.work()
        if (now := (finished, work.share)) != self._shown and work.share:
            self._shown = now
            self._show(finished, work)

    def _estimate(self, trials: Collection[Trial]) -> float:
        return sum(map(self._timings.seconds, trials))

    def _push(self, place: int, stack: Stack) -> None:
        heapq.heappush(self._waiting, (turn(stack), place, stack))

    def _feed(self) -> None:
        while self._waiting and len(self._running) < self._workers.count:
            _, place, stack = heapq.heappop(self._waiting)
            self._running[self._workers.submit(train_stack, stack, together(stack[0], self._timings.sizes))] = place, stack

    def _places(self) -> list[int]:
        return [place for place, _ in self._running.values()]

    def _records(self, future: Future[list[Record]], place: int, stack: Stack) -> list[Record]:
        try:
            records = future.result()
            self._failed_starts = 0
            return self._with_said(records)
        except WorkerNotStartedError as error:
            self._failed_starts += 1
            if self._failed_starts == STARTS:
                raise StudyFailedError(f"{error}, {STARTS} times in a row; give fewer --workers") from error
            self._push(place, stack)
            return []
        except WorkerDiedError as error:
            self._deaths[place] += 1
            if self._deaths[place] == 1:
                self._push(place, stack)
                return []
            return self._divided(place, stack, f"{first_line(error)}, twice")
        except AllocationError as error:
            return self._divided(place, stack, first_line(error))
        except BadInputError:
            raise
        except Exception as error:
            raise StudyFailedError(f"a worker process could not start: {first_line(error)}") from error

    def _with_said(self, records: list[Record]) -> list[Record]:
        return [replace(record, provenance={**record.provenance, **self._timings.said(record.trial)}) for record in records]

    def _divided(self, place: int, stack: Stack, reason: str) -> list[Record]:
        if len(stack) == 1:
            return [Record(stack[0], Outcome(status="failed", reason=reason), {})]
        for queued in self._store.split(place, halves(stack)):
            self._push(queued.place, queued.trials)
        return []
