# The two structural corrections of a convolution, twins of torch.nn.functional.conv1d, conv2d and conv3d.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_eps, check_gain
from affine_divergence.functional._geometry import conv_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.functional._scaled_conv import scaled_conv

if TYPE_CHECKING:
    from torch import Tensor


def affine_like_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def affine_like_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def affine_like_conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Convolution divided by the norm of each patch."""
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))
