# The gain of a structural layer: a number, or "auto", which is √(fan_in + 1).
from __future__ import annotations

import math
from typing import Any

from affine_divergence.functional._arguments import check_gain


def resolved_gain(gain: float | str, layer: Any) -> float:
    """The gain as a number; the layer's sizes are those of torch's layer."""
    if isinstance(gain, str):
        if gain != "auto":
            raise ValueError(f'gain must be a positive number or "auto", which is √(fan_in + 1), got {gain!r}')
        return math.sqrt(fan_in(layer) + 1.0)
    return check_gain(gain)


def fan_in(layer: Any) -> float:
    """The mean number of inputs that reach one output: of a linear layer, a convolution, or a transposed one away from its borders.

    Each input of a transposed convolution reaches ∏ kernel_size positions of a grid that is ∏ stride times as fine.
    """
    if not hasattr(layer, "kernel_size"):
        return float(layer.in_features)
    inputs = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return inputs / math.prod(layer.stride) if layer.transposed else float(inputs)
