# affdiv bench corrections: forward and backward of the layers that correct the gradient alone, against torch's and against other packages'.
from __future__ import annotations

from collections.abc import Iterator

from affine_divergence.lab.benchmarks._corrected_convs import corrected_convs
from affine_divergence.lab.benchmarks._corrected_linear import corrected_linear
from affine_divergence.lab.benchmarks._interleave import one_thread


def corrections(repeats: int) -> Iterator[str]:
    """The lines of `affdiv bench corrections`, each as soon as it is measured."""
    with one_thread():
        yield from corrected_linear(repeats)
        yield ""
        yield from corrected_convs(repeats)
