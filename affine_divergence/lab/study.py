# Runs a study: plans its trials round by round, trains the missing ones, stores what is finished.
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from affine_divergence.lab.data import Dataset, load, split_rows
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.executors import Workers, processes
from affine_divergence.lab.grid import Grid, grid_of
from affine_divergence.lab.interrupts import stoppable
from affine_divergence.lab.rounds import Round, Work, unfinished
from affine_divergence.lab.stacks import stacks
from affine_divergence.lab.stages import middling, missing, scores as scores, stages
from affine_divergence.lab.store import Queued, Store
from affine_divergence.lab.takeover import take_over
from affine_divergence.lab.timings import Timings
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.worker import Setup

Progress = Callable[[str, int, int, Work | None], None]
"""Called with the stage, the number of its trials finished, of all its trials, and their work; or of shapes where these are timed."""


def run(
    grid: Grid,
    text: str,
    store: Store,
    path: Path | None,
    *,
    workers: int = 1,
    cache: Path | None = None,
    device: str = "cpu",
    table: Path | None = None,
    progress: Progress,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Bring the store to the end of the study; what it holds, or takes over from a table of trials, is not run again.

    The rounds are those of a run that nothing disturbs: one that was begun is finished as it was planned before the next is.
    """
    with stoppable():
        path, dataset = _data(store, grid, path, cache)
        _check(grid, dataset)
        _belongs(store, grid, dataset.digest)
        takeover = take_over(table, grid, store, dataset.digest) if table is not None else None
        _bind(store, grid, text, path, dataset.digest)
        if takeover is not None:
            takeover.apply(store, say)
        failed: dict[Trial, str] = {}
        timings = Timings(store)
        with processes(workers, Setup(grid.data, path, cache, device)) as executor:
            while queue := _next(store, grid, failed, timings, executor, progress):
                later = _later(grid, store, queue, failed, timings)
                _train(store, executor, queue, failed, timings, later, progress)
    if failed:
        raise StudyFailedError(f"{len(failed)} trials failed, the first with: {next(iter(failed.values()))}")


def check(grid: Grid, path: Path | None, cache: Path | None) -> None:
    """Raise BadInputError for what no run of the grid could do."""
    _check(grid, load(grid.data, path, cache=cache))


def _check(grid: Grid, dataset: Dataset) -> None:
    if grid.claims:
        from affine_divergence.lab.claims import claims_text, parse_claims  # which reads summaries, which import this module

        parse_claims(claims_text()).judged_by(grid.claims, grid.protocols)
    if grid.train_images is not None:
        images = len(split_rows(grid.data, len(dataset.train_images))[0])
        if grid.train_images > images:
            raise BadInputError(f"train_images = {grid.train_images} in the grid file; the training part of {grid.data} has {images}")


def _next(
    store: Store, grid: Grid, failed: dict[Trial, str], timings: Timings, executor: Workers, progress: Progress
) -> list[Queued]:
    # What the round lacks that was begun, or else the next one, stored before any of it is trained.
    accuracies = scores(store.records())
    over = accuracies.keys() | failed.keys()
    queue = unfinished(store, over)
    if queue:
        return queue
    trials = missing(grid, accuracies, failed)
    if trials:
        timings.measure(trials, executor, lambda finished, total: progress("timing", finished, total, None))
        store.begin(stacks(trials, timings.sizes, timings.seconds))
    return unfinished(store, over)


def _later(grid: Grid, store: Store, queue: list[Queued], failed: dict[Trial, str], timings: Timings) -> float:
    # Estimated CPU seconds of what is expected after this round.
    accuracies = scores(store.records())
    known = accuracies.keys() | failed.keys() | {trial for queued in queue for trial in queued.trials}
    return sum(timings.seconds(trial) for stage in stages(grid, accuracies, middling(grid)) for trial in stage if trial not in known)


def _train(
    store: Store, executor: Workers, queue: list[Queued], failed: dict[Trial, str], timings: Timings, later: float, progress: Progress
) -> None:
    stage = "tuning" if queue[0].trials[0].role == "tuning" else "evaluation"
    total = sum(len(queued.trials) for queued in queue)
    progress(stage, 0, total, Work(0.0, None))
    one = Round(store, executor, queue, lambda finished, work: progress(stage, finished, total, work), timings, later)
    try:
        for records in one.run():
            failed.update((r.trial, r.outcome.reason or "") for r in records if r.outcome.status == "failed")
    except KeyboardInterrupt:
        one.rescue()
        raise


def _data(store: Store, grid: Grid, path: Path | None, cache: Path | None) -> tuple[Path | None, Dataset]:
    # The path given now, or else the one that was given before; and the images there.
    remembered = store.get("data_path") if path is None else None
    if remembered is not None:
        path = Path(remembered)
    try:
        return path, load(grid.data, path, cache=cache)
    except BadInputError as error:
        if remembered is None:
            raise
        raise BadInputError(f"{error}; this path is from an earlier run: --data {grid.data}=PATH names another") from error


def _belongs(store: Store, grid: Grid, digest: str) -> None:
    # A store belongs to one study on one set of images; its grid may grow.
    for name, value, what in (("study", grid.study, "the study"), ("data_digest", digest, "images with the digest")):
        stored = store.get(name)
        if stored is not None and stored != value:
            raise BadInputError(f"this store holds {what} {stored}, not {value}; name another folder with --store")


def _bind(store: Store, grid: Grid, text: str, path: Path | None, digest: str) -> None:
    values = {"study": grid.study, "data_digest": digest, "grid": text}
    if store.get("grid") is None:
        from affine_divergence.lab.claims import claims_text  # which reads summaries, which import this module

        values["claims"] = claims_text()  # a study is judged by the claims that were current when it began
    if path is not None:
        values["data_path"] = str(path.absolute())
    store.put(values, forget_queue=not _same(store, grid))


def _same(store: Store, grid: Grid) -> bool:
    stored = store.get("grid")
    try:
        return stored is not None and grid_of(stored, "", store.trials()) == grid
    except BadInputError:
        return False
