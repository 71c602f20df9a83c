# affdiv reproduce: an embedded study from nothing to its report.
from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.cli._kept import kept
from affine_divergence.cli._options import Workers, worker_count
from affine_divergence.cli._print import show_report
from affine_divergence.cli._progress import progress
from affine_divergence.lab import study as studies
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import parse_grid
from affine_divergence.lab.store import opened


def reproduce(
    study: str = "quick",
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Folder for store and report; results/STUDY if not given.")] = None,
    workers: Workers = None,
) -> None:
    """Run an embedded study and make its report. A second call only makes the report again.

    Parameters
    ----------
    study
        Name of the study; "quick" compares the methods on scikit-learn's digits.
    """
    folder = resources.files("affine_divergence.lab") / "studies"
    known = sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))
    if study not in known:
        raise BadInputError(f"there is no embedded study {study}; there are: {', '.join(known)}")
    text = (folder / f"{study}.toml").read_text(encoding="utf-8")
    grid = parse_grid(text, study)
    out = out or Path("results") / study
    with kept(), opened(out / "store") as store, progress() as show:
        studies.run(grid, text, store, None, workers=worker_count(workers), progress=show)
        records = store.records()
    show_report(records, text, out)
