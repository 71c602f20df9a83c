# affdiv bench: measurements, each against what a user would take instead.
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError


def bench(
    what: Literal["layers", "corrections", "diagnosis", "training", "stopping"],
    /,
    *tables: Path,
    repeats: Annotated[int | None, Parameter(help="Interleaved rounds, 9 if not given; the medians are shown.")] = None,
) -> None:
    """Measure side by side in one process, interleaved, with one thread, and print medians and ratios.

    Parameters
    ----------
    what
        "layers": forward and backward of the corrected layers, linear ones and convolutions, against torch's, in some minutes.
        "corrections": the same of the layers that correct the gradient alone, beside K-FAC (asdl) and per-sample gradients (opacus,
        torch.func) where they are installed: pip install 'affine-divergence[bench]'.
        "diagnosis": a diagnosed step against a plain one and against the gradients of every sample, and its memory.
        "training": the lab's stacks against the usual loop.
        "stopping": what rules that stop tuning trials early would have saved in finished studies. Times nothing.
    tables
        For "stopping": the trials.parquet of each study.
    """
    if what == "stopping":
        if not tables or repeats is not None:
            raise BadInputError("affdiv bench stopping takes the trials.parquet of some studies, and no --repeats")
    elif tables:
        raise BadInputError(f"affdiv bench {what} takes no tables, got {tables[0]}")
    repeats = 9 if repeats is None else repeats
    if repeats < 3:
        raise BadInputError(f"--repeats must be at least 3, got {repeats}")
    from affine_divergence.lab import benchmarks

    if what == "stopping":
        for line in benchmarks.stopping(tables):
            print(line, flush=True)
        return

    measured = {
        "layers": benchmarks.layers,
        "corrections": benchmarks.corrections,
        "diagnosis": benchmarks.diagnosis,
        "training": benchmarks.training,
    }[what]
    for line in measured(repeats):
        print(line, flush=True)
