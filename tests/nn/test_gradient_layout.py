# The strides of the gradients of the corrected layers, which are those of torch's own layers.
from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affine_divergence.nn as ad_nn

FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
CHANNELS = {
    "depthwise": (4, 4, 4),
    "multiplier": (4, 8, 4),
    "dense": (4, 4, 1),
    "grouped": (4, 6, 2),
    "one-in": (1, 4, 1),
    "one-out": (4, 1, 1),
}
kinds = pytest.mark.parametrize("kind", ["SampleCorrected", "BatchCorrected"])


def _strides(layer: Any, x: Tensor) -> list[tuple[int, ...]]:
    z = layer(x)
    upstream = torch.randn_like(z)
    gradients = torch.autograd.grad(z, [x, layer.weight], upstream)
    layer(x).backward(upstream)
    assert layer.weight.grad is not None
    return [t.stride() for t in (z, *gradients, layer.weight.grad)]


@kinds
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels", CHANNELS)
def test_weight_gradient_of_a_convolution_has_torchs_strides(kind: str, dims: int, channels: str) -> None:
    *sizes, groups = CHANNELS[channels]
    for bias, of_x, of_weight in product((True, False), (torch.contiguous_format, FORMATS[dims]), (torch.contiguous_format, FORMATS[dims])):
        layers: list[Any] = [cls(*sizes, 3, groups=groups, bias=bias) for cls in _classes(kind, dims)]
        x = torch.randn(2, sizes[0], *(4,) * dims).to(memory_format=of_x).requires_grad_()
        ours, theirs = (_strides(layer.to(memory_format=of_weight) if dims > 1 else layer, x) for layer in layers)
        assert ours == theirs, (bias, of_x, of_weight)


@kinds
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_gradients_exist_in_channels_last_for_every_dtype(kind: str, channels: str, dtype: torch.dtype) -> None:
    *sizes, groups = CHANNELS[channels]
    ours, theirs = (cls(*sizes, 3, groups=groups, dtype=dtype).to(memory_format=torch.channels_last) for cls in _classes(kind, 2))
    x = torch.randn(2, sizes[0], 4, 4).to(dtype).to(memory_format=torch.channels_last)
    for layer in (ours, theirs):
        layer(x).sum().backward()
    assert ours.weight.grad.stride() == theirs.weight.grad.stride()


@kinds
def test_gradients_of_a_linear_layer_are_contiguous(kind: str) -> None:
    layer = getattr(ad_nn, f"{kind}Linear")(4, 3)
    for rows in (2, 9):
        for gradient in torch.autograd.grad(layer(torch.randn(rows, 4)).square().sum(), [*layer.parameters()]):
            assert gradient.is_contiguous()


def _classes(kind: str, dims: int) -> tuple[Any, Any]:
    return getattr(ad_nn, f"{kind}Conv{dims}d"), getattr(nn, f"Conv{dims}d")
