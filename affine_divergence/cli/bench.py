# affdiv bench: measurements, each against what a user would take instead.
from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError


def bench(
    what: Literal["layers", "corrections", "diagnosis", "training"],
    /,
    *,
    repeats: Annotated[int, Parameter(help="Interleaved rounds; the medians are shown.")] = 9,
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
    """
    if repeats < 3:
        raise BadInputError(f"--repeats must be at least 3, got {repeats}")
    from affine_divergence.lab import benchmarks

    measured = {
        "layers": benchmarks.layers,
        "corrections": benchmarks.corrections,
        "diagnosis": benchmarks.diagnosis,
        "training": benchmarks.training,
    }[what]
    for line in measured(repeats):
        print(line, flush=True)
