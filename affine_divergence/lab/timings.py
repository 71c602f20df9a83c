# Whether convolutional trials train faster together or alone: grouped convolutions often do not, so both are timed before the training.
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from affine_divergence.lab.errors import BadInputError, StudyFailedError, first_line
from affine_divergence.lab.executors import WorkerDiedError, WorkerNotStartedError, Workers
from affine_divergence.lab.stacks import Shape, shape_of
from affine_divergence.lab.store import Store
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.worker import time_step

TOGETHER = 8
NAME = "timings"  # in the store


class Timing(NamedTuple):
    """CPU seconds of a trial's step alone, and in a stack of `TOGETHER`; None where that could not be trained."""

    alone: float | None
    together: float | None

    @property
    def size(self) -> int:
        """How many trials are trained together at most."""
        return TOGETHER if self.alone and self.together and self.together < self.alone else 1

    def __str__(self) -> str:
        alone, together = ("–" if time is None else f"{1e3 * time:.2f} ms" for time in self)
        return f"alone {alone}, {TOGETHER} together {together}"


class Timings:
    """What was timed for a study, kept in its store: one that goes on must train the stacks that it would have trained."""

    def __init__(self, store: Store) -> None:
        self._store = store
        text = store.get(NAME)
        self.known = {} if text is None else _read(text)

    @property
    def sizes(self) -> dict[Shape, int]:
        """How many trials of a shape are trained together at most."""
        return {shape: timing.size for shape, timing in self.known.items()}

    def said(self, trial: Trial) -> dict[str, str]:
        """What the record of a trial says of it."""
        timing = self.known.get(shape) if (shape := shape_of(trial)) else None
        return {} if timing is None else {"timing": str(timing)}

    def measure(self, trials: Iterable[Trial], workers: Workers, show: Callable[[int, int], None]) -> None:
        """Time the shapes that are not known yet, in the workers."""
        wanted = {shape: trial for trial in trials if (shape := shape_of(trial)) and shape not in self.known}
        if not wanted:
            return
        show(0, len(wanted))
        futures = {workers.submit(time_step, _several(trial)): shape for shape, trial in wanted.items()}
        for count, future in enumerate(as_completed(futures), 1):
            self.known[futures[future]] = _timing(future)
            self._store.put({NAME: json.dumps(list(self.known.items()))})
            show(count, len(wanted))


def _read(text: str) -> dict[Shape, Timing]:
    try:
        return dict(TypeAdapter(list[tuple[Shape, Timing]]).validate_json(text))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadInputError(f"the store's {NAME} were changed: {wrong['msg']}, got {wrong['input']!r}; use another store") from error


def _several(trial: Trial) -> tuple[Trial, ...]:
    return tuple(trial.model_copy(update={"seed": seed}) for seed in range(TOGETHER))


def _timing(future: Future[tuple[float | None, float | None]]) -> Timing:
    try:
        return Timing(*future.result())
    except WorkerDiedError:  # perhaps eight were too many; whether one is shows when it is trained
        return Timing(None, None)
    except WorkerNotStartedError as error:
        raise StudyFailedError(f"{error}; give fewer --workers") from error
    except BadInputError:
        raise
    except Exception as error:
        raise StudyFailedError(f"a step could not be timed: {first_line(error)}") from error
