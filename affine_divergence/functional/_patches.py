# Statistics of patches: the squared norm of what reaches every output position, in float32 or wider, never unfolded.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._channels import channel_sqnorm
from affine_divergence.functional._geometry import conv_geometry

if TYPE_CHECKING:
    from torch import Tensor


def patch_sqnorm(
    x: Tensor,
    kernel_size: int | tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Tensor:
    """Squared norm of every patch that a convolution reads."""
    kernel = (kernel_size,) * (x.dim() - 2) if isinstance(kernel_size, int) else tuple(kernel_size)
    geometry = conv_geometry(kernel, stride, padding, dilation, groups)
    batched = x.dim() == len(kernel) + 2
    sqnorm = geometry.patch_sums(channel_sqnorm(x if batched else x.unsqueeze(0), groups))
    return sqnorm if batched else sqnorm.squeeze(0)
