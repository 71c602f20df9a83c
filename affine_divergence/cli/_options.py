# Options that several commands share.
from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError

Workers = Annotated[int | None, Parameter(help="Worker processes, one thread each; as many as there are cores if not given.")]
Cache = Annotated[Path | None, Parameter(help="Folder for decoded images; the user's cache folder if not given.")]
Out = Annotated[Path, Parameter(help="Folder to write report.html, figures/*.svg and trials.parquet to.")]


def worker_count(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise BadInputError(f"--workers must be at least 1, got {workers}")
    return workers
