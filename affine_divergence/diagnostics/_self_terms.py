# G_ii: what a gradient step on a layer's own parameters multiplies the ideal update of each output by, corrected and plain.
#
# A row is what one output is made of: a row of a linear layer's input, the patch of one image, group and output position for a convolution.
from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from affine_divergence.functional._arguments import check_eps
from affine_divergence.functional._rows import row_sqnorm
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.nn import (
    AffineLikeLinear,
    NormLikeLinear,
    SampleCorrectedConv1d,
    SampleCorrectedConv2d,
    SampleCorrectedConv3d,
    SampleCorrectedLinear,
)
from affine_divergence.nn._patch_norm import PatchNorm

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE_CORRECTED = (SampleCorrectedLinear, SampleCorrectedConv1d, SampleCorrectedConv2d, SampleCorrectedConv3d)
CORRECTED = (AffineLikeLinear, NormLikeLinear, PatchNorm, *_SAMPLE_CORRECTED)
"""The types of the layers whose corrected G_ii is known of a row alone; that of the batch correction hangs on the other rows."""


def corrected_term(layer: Any, sqnorms: Tensor) -> Tensor:
    """c² s² (‖x‖² + 1) of every row with the bias under the scale, c² (s²‖x‖² + 1) with it outside; 1 of a sample-corrected one."""
    if isinstance(layer, _SAMPLE_CORRECTED):
        return (plain_term(layer, sqnorms) > 0).to(sqnorms.dtype)
    scale = norm_like(layer.gain, check_eps(layer.eps)) if _is_norm_like(layer) else affine_like(layer.gain)
    _, t = scale(sqnorms)
    weight, bias = _trained(layer)
    return weight * t.square() * sqnorms + bias * (t.square() if scale.scales_bias else scale.gain**2)


def plain_term(layer: Any, sqnorms: Tensor) -> Tensor:
    """‖x‖² + 1 of every row."""
    weight, bias = _trained(layer)
    return weight * sqnorms + bias


def sqnorms(layer: Any, x: Tensor, *options: Any) -> Tensor:
    """‖x‖² of every row that the layer makes of its input, in float64."""
    x = x.double()
    if _plain_type(layer) is nn.Linear:
        return row_sqnorm(x)
    axis = -1 - len(layer.kernel_size)
    squares = x.square().unflatten(axis, (layer.groups, -1)).sum(axis)
    # Torch's layer with weights of one, a channel a group: it pads as the corrected one does, and takes an output_size where that does.
    return _plain_forward(layer, squares, x.new_ones(layer.groups, 1, *layer.kernel_size), None, *options)


def uncorrected(layer: Any, dtype: torch.dtype, x: Tensor, *options: Any) -> Tensor:
    """The layer's output without the correction, in the dtype of the corrected one: the layers that follow count on it."""
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return _plain_forward(layer, x.to(dtype), layer.weight.to(dtype), bias, *options)


def _plain_forward(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    plain = _plain_type(layer)
    arguments = {name: getattr(layer, name) for name in inspect.signature(plain).parameters if name not in ("bias", "device", "dtype")}
    twin = plain(**arguments, bias=bias is not None, device="meta")  # without memory or random numbers
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    with warnings.catch_warnings():  # torch says that it copies the input, which the corrected layer does without a word
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths", UserWarning)
        own: Tensor = functional_call(twin, parameters, (x, *options))
    return own


def _plain_type(layer: nn.Module) -> type[nn.Module]:
    # Torch's layer without the correction.
    if isinstance(layer, PatchNorm):
        return layer._plain
    return next((plain for plain in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, plain)), nn.Linear)


def _is_norm_like(layer: Any) -> bool:
    return isinstance(layer, NormLikeLinear) or getattr(layer, "form", None) == "norm-like"


def _trained(layer: Any) -> tuple[float, float]:
    # 1 for what a step changes, 0 for what is frozen or not there: it has no part in G.
    return float(layer.weight.requires_grad), float(layer.bias is not None and layer.bias.requires_grad)
