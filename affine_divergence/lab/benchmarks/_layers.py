# affdiv bench layers: forward and backward of the corrected layers, and what they save for the backward.
from __future__ import annotations

from collections.abc import Iterator

from affine_divergence.lab.benchmarks._conv_layers import conv_layers
from affine_divergence.lab.benchmarks._interleave import one_thread
from affine_divergence.lab.benchmarks._linear_layers import linear_layers


def layers(repeats: int) -> Iterator[str]:
    """The lines of `affdiv bench layers`, each as soon as it is measured."""
    with one_thread():
        yield from linear_layers(repeats)
        yield ""
        yield from conv_layers(repeats)
