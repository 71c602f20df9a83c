# z_p = c·s_p·(W·patch_p + b), or c·(s_p·W·patch_p + b), with s_p = (‖patch_p‖² + offset)^(−1/2) per position and group.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from affine_divergence.functional._autocast import autocast_enabled, common_dtype, without_autocast
from affine_divergence.functional._geometry import Geometry
from affine_divergence.functional._patches import position_sqnorm

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.functional._scale import Scale


def scaled_conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale) -> Tensor:
    """The map itself, in the dtype that torch's convolution would return, or in the promoted one where it refuses mixed dtypes."""
    device = x.device.type
    dtype = common_dtype(x, weight, bias)
    weight = weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if not autocast_enabled(device):
        x = x.to(dtype)
    batched = x.dim() == weight.dim()
    with without_autocast(device):
        x, geometry = geometry.padded(x if batched else x.unsqueeze(0))
        z = _composed(x, weight, bias, geometry, scale)
    return z if batched else z.squeeze(0)


def _composed(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale) -> Tensor:
    _, t = scale(geometry.patch_sums(position_sqnorm(x, geometry.groups)))
    wide = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    shift = None if bias is None else bias.to(wide)
    y = geometry.convolve(x.to(wide), weight.to(wide), shift if scale.scales_bias else None)
    z = times(y, t)
    if shift is not None and not scale.scales_bias:
        z = z + scale.gain * shift.reshape(-1, *[1] * (y.dim() - 2))
    return z.to(weight.dtype)


def times(y: Tensor, t: Tensor) -> Tensor:
    """y (N, channels, *size) times t (N, groups, *size)."""
    if t.shape[1] in (1, y.shape[1]):
        return y * t
    return (y.unflatten(1, (t.shape[1], -1)) * t.unsqueeze(2)).flatten(1, 2)
