# affdiv bench: measurements, each against what a user would take instead.
from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from affine_divergence.lab.errors import BadInputError


def bench(
    what: Literal["layers"],
    /,
    *,
    repeats: Annotated[int, Parameter(help="Interleaved rounds; the medians are shown.")] = 15,
) -> None:
    """Measure side by side in one process, interleaved, with one thread, and print medians and ratios.

    Parameters
    ----------
    what
        "layers": forward and backward of the corrected layers against torch's.
    """
    if repeats < 3:
        raise BadInputError(f"--repeats must be at least 3, got {repeats}")
    from affine_divergence.lab.benchmarks import layers

    print(layers(repeats))
