# Timed steps: whether convolutional trials train faster together or alone (grouped convolutions often do not), and how long trials take.
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, as_completed
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from affine_divergence.lab.costs import evaluations_of, nominal_seconds, steps_of
from affine_divergence.lab.errors import BadInputError, StudyFailedError, first_line
from affine_divergence.lab.executors import WorkerDiedError, WorkerNotStartedError, Workers
from affine_divergence.lab.stacks import Shape, shape_of, together
from affine_divergence.lab.store import Store
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.worker import time_step

TOGETHER = 8
MANY, OF_A_SEED = 24, 6  # fully-connected trials that are timed together
NAME = "timings"  # in the store


class Timing(NamedTuple):
    """CPU seconds of a trial's step alone, and in a stack of `TOGETHER`, and of the evaluation of an image; None where unknown."""

    alone: float | None
    together: float | None
    evaluation: float | None = None

    @property
    def size(self) -> int:
        """How many trials are trained together at most."""
        return TOGETHER if self.alone and self.together and self.together < self.alone else 1

    def seconds(self, trial: Trial) -> float | None:
        """CPU seconds of a whole trial, in a stack where that is faster; always so for a fully-connected one."""
        step = self.together if self.together and (self.size > 1 or not trial.pattern) else self.alone
        return None if step is None else steps_of(trial) * step + evaluations_of(trial) * (self.evaluation or 0.0)

    def __str__(self) -> str:
        alone, together = ("–" if time is None else f"{1e3 * time:.2f} ms" for time in self[:2])
        return f"alone {alone}, {TOGETHER} together {together}"


class Probe:
    """What was timed, by shape."""

    def __init__(self, known: dict[Shape, Timing]) -> None:
        self.known = known

    @property
    def sizes(self) -> dict[Shape, int]:
        """How many trials of a shape are trained together at most."""
        return {shape: timing.size for shape, timing in self.known.items()}

    def seconds(self, trial: Trial) -> float:
        """Estimated CPU seconds of a trial: by its timed step, or else by the nominal times of `costs`."""
        timing = self.known.get(shape_of(trial))
        return (timing and timing.seconds(trial)) or nominal_seconds(trial)


class Timings(Probe):
    """What was timed for a study, kept in its store: one that goes on must train the stacks that it would have trained."""

    def __init__(self, store: Store) -> None:
        self._store = store
        text = store.get(NAME)
        super().__init__({} if text is None else _read(text))

    def said(self, trial: Trial) -> dict[str, str]:
        """What the record of a trial says of it."""
        timing = self.known.get(shape_of(trial))
        return {} if timing is None else {"timing": str(timing)}

    def measure(self, trials: Iterable[Trial], workers: Workers, show: Callable[[int, int], None]) -> None:
        """Time the convolutional shapes that are not known yet, in the workers."""
        unknown = [trial for trial in trials if trial.pattern and shape_of(trial) not in self.known]
        for shape, timing in timed(unknown, workers, show):
            self.known[shape] = timing
            self._store.put({NAME: json.dumps(list(self.known.items()))})


def timed(trials: Iterable[Trial], workers: Workers, show: Callable[[int, int], None]) -> Iterator[tuple[Shape, Timing]]:
    """The timing of each shape of some trials, as soon as a worker has taken it."""
    wanted = {shape_of(trial): trial for trial in trials}
    if not wanted:
        return
    show(0, len(wanted))
    futures = {workers.submit(time_step, _several(trial)): shape for shape, trial in wanted.items()}
    for count, future in enumerate(as_completed(futures), 1):
        yield futures[future], _timing(future)
        show(count, len(wanted))


def _read(text: str) -> dict[Shape, Timing]:
    try:
        return dict(TypeAdapter(list[tuple[Shape, Timing]]).validate_json(text))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise BadInputError(f"the store's {NAME} were changed: {wrong['msg']}, got {wrong['input']!r}; use another store") from error


def _several(trial: Trial) -> tuple[Trial, ...]:
    if trial.pattern:
        return tuple(trial.model_copy(update={"seed": seed}) for seed in range(TOGETHER))
    # As many of each seed as a study has methods, or rates, of it: they share their images, which makes them faster.
    count = min(MANY, together(trial, {}))
    return tuple(trial.model_copy(update={"seed": place // OF_A_SEED}) for place in range(count))


def _timing(future: Future[tuple[float | None, float | None, float | None]]) -> Timing:
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
