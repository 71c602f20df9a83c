# Runs a study: plans its trials, trains the missing ones stack by stack, stores what is finished.
from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from affine_divergence.lab.data import load
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.executors import processes, train_stack
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.store import Record, Store
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

MAX_STACK, MAX_COLUMNS = 96, 2560  # replicas, and columns of their first layers: on CIFAR-10 31 MB of weights, read and written at every step

Progress = Callable[[str, int, int], None]
"""Called with the stage, the number of its trials finished, and of all its trials."""


def run(
    grid: Grid, text: str, store: Store, path: Path | None, *, workers: int = 1, cache: Path | None = None, progress: Progress
) -> None:
    """Bring the store to the end of the study; what it already holds is not run again."""
    dataset = load(grid.data, path, cache=cache)
    _bind(store, grid, text, dataset.digest)
    missing = _missing(grid, store)
    if not missing:
        return
    with processes(workers, grid.data, path, cache) as executor:
        while missing:
            stage = "tuning" if missing[0].role == "tuning" else "evaluation"
            total, finished = len(missing), 0
            progress(stage, finished, total)
            futures = [executor.submit(train_stack, stack) for stack in stacks(missing)]
            failures: list[Record] = []
            try:
                for future in as_completed(futures):
                    records = future.result()
                    store.add(records)
                    failures.extend(record for record in records if record.outcome.status == "failed")
                    finished += len(records)
                    progress(stage, finished, total)
            except BrokenProcessPool as error:
                raise StudyFailedError(
                    "a worker process died, perhaps for lack of memory; what is finished is stored: run it again with fewer --workers"
                ) from error
            if failures:
                raise StudyFailedError(f"{len(failures)} trials failed, the first with: {failures[0].outcome.reason}")
            missing = _missing(grid, store)


def _missing(grid: Grid, store: Store) -> list[Trial]:
    return plan(grid, scores(store.records())).missing


def scores(records: Sequence[Record]) -> Mapping[Trial, float]:
    """Validation accuracies of the finished trials, by which learning rates are chosen."""
    return {
        record.trial: record.outcome.validation_accuracy for record in records if record.outcome.validation_accuracy is not None
    }


def stacks(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Trials that can be trained together, in parts of a fitting size: low seeds first, then the dearest first."""
    groups: dict[object, list[Trial]] = defaultdict(list)
    for trial in sorted(trials, key=lambda trial: trial.seed):  # those of one seed share their images
        groups[trial.shared].append(trial)
    parts: list[list[Trial]] = []
    for group in groups.values():
        count = -(-len(group) // max(1, min(MAX_STACK, MAX_COLUMNS // group[0].width)))
        bounds = [len(group) * i // count for i in range(count + 1)]
        parts.extend(group[start:end] for start, end in itertools.pairwise(bounds))
    return sorted(parts, key=lambda part: (part[0].seed, -len(part) * part[0].width * part[0].depth))


def _bind(store: Store, grid: Grid, text: str, digest: str) -> None:
    # A store belongs to one study on one set of images; its grid may grow.
    for name, value, what in (("study", grid.study, "the study"), ("data_digest", digest, "images with the digest")):
        stored = store.get(name)
        if stored is not None and stored != value:
            raise BadInputError(f"this store holds {what} {stored}, not {value}; name another folder with --store")
        store.put(name, value)
    store.put("grid", text)
