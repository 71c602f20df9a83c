# The squared norm of what every output position of a convolution sees, in float32 or wider, never unfolded.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional._arguments import check_floating, check_groups
from affine_divergence.functional._channels import channel_sqnorm, scale_channels
from affine_divergence.functional._geometry import Geometry, conv_geometry, whole_numbers
from affine_divergence.functional._rows import composes

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def patch_sqnorm(
    x: Float[Tensor, "*n channels *size"],
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Float[Tensor, "*n groups *size_out"]:
    r"""Squared norm ‖patch_p‖² of every patch that a convolution reads, per position and group.

    It is the sum over windows of Σ_c x_c², made by additions along each axis in turn: nothing is unfolded. What it is for:
    ‖patch_p‖² + 1 is the factor by which a plain convolution multiplies the learning rate of each position.

    Args:
        x: (N, channels, *size), or (channels, *size) where kernel_size is a tuple, whose length is the number of axes.
        kernel_size: one number for each axis; a single number is for all axes of a batched x, x.dim() − 2 of them.
        stride: as in `F.conv2d`.
        padding: as in `F.conv2d`: numbers, "valid" or "same". Padding with anything but zeros is done to x before.
        dilation: as in `F.conv2d`.
        groups: as in `F.conv2d`.

    Returns:
        (N, groups, *size_out), or (groups, *size_out), in float32 or the wider dtype of x.

    Raises:
        TypeError: x is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, or an option is out of its range.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x = torch.tensor([[[[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]]])
    >>> patch_sqnorm(x, 2)  # 1 + 4 + 0 + 1 and 4 + 9 + 1 + 0
    tensor([[[[ 6., 14.]]]])
    """
    check_floating("x", x)
    check_groups(groups)
    dims = len(kernel_size) if isinstance(kernel_size, (tuple, list)) else x.dim() - 2
    if dims < 1 or x.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"x must have the shape (N, channels, *size), or (channels, *size) with a tuple as kernel_size, got {tuple(x.shape)} "
            f"and kernel_size {kernel_size!r}"
        )
    geometry = conv_geometry(whole_numbers("kernel_size", kernel_size, dims, 1), stride, padding, dilation, groups)
    batched = x.dim() == dims + 2
    x = x if batched else x.unsqueeze(0)
    if x.shape[1] % groups:
        raise ValueError(f"x must have a number of channels that groups = {groups} divides, got {x.shape[1]} in {tuple(x.shape)}")
    geometry.check_size(x.shape[2:])
    recorded = torch.is_grad_enabled() and not composes()
    sqnorm: Tensor = _PatchSqnorm.apply(x, geometry) if recorded else _patch_sqnorm(x, geometry)
    return sqnorm if batched else sqnorm.squeeze(0)


def _patch_sqnorm(x: Tensor, geometry: Geometry) -> Tensor:
    return geometry.patch_sums(channel_sqnorm(x, geometry.groups))


class _PatchSqnorm(torch.autograd.Function):
    # The forward runs without grad mode, so that it is the same computation whether or not a graph is recorded.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, geometry: Geometry) -> Tensor:
        return _patch_sqnorm(x, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: Tensor) -> None:
        x, ctx.geometry = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        spread = ctx.geometry.patch_spread(2.0 * upstream[0], x.shape[2:])
        return scale_channels(x, spread).to(x.dtype), None
