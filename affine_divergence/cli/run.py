# affdiv run: train what a grid file asks for and the store lacks.
from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.cli._options import Cache, Workers, worker_count
from affine_divergence.cli._progress import progress
from affine_divergence.lab import study
from affine_divergence.lab.data import parse_source
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import Grid, read_grid
from affine_divergence.lab.store import opened


def run(
    grid: Path,
    /,
    *,
    store: Annotated[Path, Parameter(help="Folder of the results; what it already holds is not run again.")],
    data: Annotated[str | None, Parameter(help="NAME or NAME=PATH of the images, as in cifar10-jpeg=FOLDER.")] = None,
    workers: Workers = None,
    cache: Cache = None,
) -> None:
    """Train the trials of a grid file, tuning learning rates where it says so.

    Interrupted, the same command goes on where it stopped.

    Parameters
    ----------
    grid
        TOML file of the study.
    """
    checked, text = read_grid(grid)
    count = worker_count(workers)
    path = _path(checked, data)
    with opened(store) as results, progress() as show:
        study.run(checked, text, results, path, workers=count, cache=cache, progress=show)
    print(f"{checked.study} is finished: affdiv report {store} --out FOLDER makes its page")


def _path(grid: Grid, data: str | None) -> Path | None:
    if data is None:
        return None
    name, path = parse_source(data)
    if name != grid.data:
        raise BadInputError(f"the grid file asks for the data {grid.data}, --data names {name}; make them the same")
    return path
