# What run and resume do: train what a grid asks for and a store lacks, and say how to go on where that ends early.
from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from affine_divergence.cli._options import data_path, worker_count
from affine_divergence.cli._progress import progress, tell
from affine_divergence.lab import study
from affine_divergence.lab.devices import check_device
from affine_divergence.lab.errors import BadInputError, StudyFailedError
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.store import FILE, opened, read


def train(
    grid: Grid,
    text: str,
    store: Path,
    *,
    data: str | None,
    workers: int | None,
    cache: Path | None,
    device: str,
    table: Path | None = None,
) -> None:
    count, path = worker_count(workers), data_path(grid, data)
    check_device(device)
    if not (store / FILE).is_file():
        study.check(grid, path, cache)  # what is refused leaves no empty store behind
    with _way_out(store), opened(store) as results, progress() as show:
        study.run(grid, text, results, path, workers=count, cache=cache, device=device, table=table, progress=show, say=tell)
    print(f"{grid.study} is finished: affdiv report {shlex.quote(str(store))} --out FOLDER makes its page")


@contextmanager
def _way_out(store: Path) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, StudyFailedError) as error:
        begun = False
        with suppress(BadInputError, StudyFailedError), read(store) as results:
            begun = results.get("grid") is not None
        if begun:
            error.add_note(f"affdiv resume {shlex.quote(str(store))} goes on from there")
        elif isinstance(error, StudyFailedError):
            error.add_note("the same command starts again")
        raise
