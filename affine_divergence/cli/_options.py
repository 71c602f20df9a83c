# Options that several commands share.
from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.lab.data import parse_source
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import Grid

Workers = Annotated[int | None, Parameter(help="Worker processes, one thread each; as many as there are cores if not given.")]
Cache = Annotated[Path | None, Parameter(help="Folder for decoded images; the user's cache folder if not given.")]
Data = Annotated[str | None, Parameter(help="NAME or NAME=PATH of the images, as in cifar10-jpeg=FOLDER; remembered in the store.")]
Device = Annotated[str, Parameter(help="Where to train: cpu, cuda, cuda:1, …, mps.")]
Out = Annotated[Path, Parameter(help="Folder to write report.html, figures/*.svg and trials.parquet to.")]


def worker_count(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise BadInputError(f"--workers must be at least 1, got {workers}")
    return workers


def data_path(grid: Grid, data: str | None) -> Path | None:
    if data is None:
        return None
    name, path = parse_source(data)
    if name != grid.data:
        raise BadInputError(f"the grid file asks for the data {grid.data}, --data names {name}; make them the same")
    return path
