# Patterns of convolutional nets: kernels and strides, layer by layer, as one word.
from __future__ import annotations

import itertools
import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

LAYER = re.compile(r"k([1-9][0-9]?)s([1-9])")


class Kernel(NamedTuple):
    """The size and the stride of a convolution, the same in both directions."""

    size: int
    stride: int


def kernels(pattern: str, depth: int) -> list[Kernel]:
    """The convolutions of a net of that depth: those of the pattern, repeated.

    >>> kernels("k5s2-k3s1", 3)
    [Kernel(size=5, stride=2), Kernel(size=3, stride=1), Kernel(size=5, stride=2)]
    """
    return _repeated(_parsed(pattern), depth)


def check_depth(pattern: str, depth: int) -> None:
    """Raise ValueError where a shorter pattern makes the same net of that depth: two names would count as two architectures."""
    layers = _parsed(pattern)
    for length in range(1, len(layers)):
        if _repeated(layers, depth) == _repeated(layers[:length], depth):
            raise ValueError(f"at depth {depth} the pattern {pattern} is {_start(pattern, length)}: write that")


def _parsed(pattern: str) -> list[Kernel]:
    found = [LAYER.fullmatch(layer) for layer in pattern.split("-")]
    layers = [Kernel(int(one[1]), int(one[2])) for one in found if one]
    if len(layers) < len(found):
        raise ValueError("a pattern names kernels and strides, as k3s2-k3s1: 3×3 with stride 2 and 3×3 with stride 1 in turn")
    if any(layer.size % 2 == 0 for layer in layers):
        raise ValueError("kernels are odd, so that padding by half of them keeps the image in its place")
    for length in range(1, len(layers)):
        if len(layers) % length == 0 and layers == _repeated(layers[:length], len(layers)):
            raise ValueError(f"the pattern repeats itself, as patterns do: write {_start(pattern, length)}")
    return layers


def _repeated(layers: list[Kernel], depth: int) -> list[Kernel]:
    return list(itertools.islice(itertools.cycle(layers), depth))


def _start(pattern: str, length: int) -> str:
    return "-".join(pattern.split("-")[:length])


def _checked(pattern: str) -> str:
    _parsed(pattern)
    return pattern


Pattern = Annotated[str, AfterValidator(_checked)]
