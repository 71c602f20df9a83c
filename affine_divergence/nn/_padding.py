# Padding with other than zeros, which torch's convolutional layers do before they convolve.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def padded(layer: Any, x: Tensor) -> tuple[Tensor, str | tuple[int, ...]]:
    """The input as a convolutional layer convolves it, and the padding that is left to the convolution."""
    if layer.padding_mode == "zeros":
        return x, layer.padding
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), "valid"
