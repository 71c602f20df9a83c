# affdiv run: train what a grid file asks for and the store lacks.
from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.cli._options import Cache, Data, Device, Workers
from affine_divergence.cli._training import train
from affine_divergence.lab.grid import read_grid


def run(
    grid: Path,
    /,
    *,
    store: Annotated[Path, Parameter(help="Folder of the results; what it already holds is not run again.")],
    data: Data = None,
    workers: Workers = None,
    cache: Cache = None,
    device: Device = "cpu",
    resume_from: Annotated[Path | None, Parameter(help="A trials.parquet of this study, whose results are taken over first.")] = None,
) -> None:
    """Train the trials of a grid file, tuning learning rates where it says so.

    Interrupted, affdiv resume goes on where it stopped.

    Parameters
    ----------
    grid
        TOML file of the study.
    """
    checked, text = read_grid(grid)
    train(checked, text, store, data=data, workers=workers, cache=cache, device=device, table=resume_from)
