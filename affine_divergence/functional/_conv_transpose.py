# The two structural corrections of a transposed convolution, twins of torch.nn.functional.conv_transpose1d, conv_transpose2d and conv_transpose3d.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_eps, check_gain
from affine_divergence.functional._geometry import conv_transpose_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.functional._scaled_conv import scaled_conv

if TYPE_CHECKING:
    from torch import Tensor


def affine_like_conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def affine_like_conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def affine_like_conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Transposed convolution divided by the norm of what reaches each output position."""
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))
