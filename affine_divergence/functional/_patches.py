# Statistics of patches: the squared norm of what reaches every output position, in float32 or wider, never unfolded.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._geometry import Geometry, conv_geometry
from affine_divergence.functional._rows import wide_dtype

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
    sqnorm = geometry.patch_sums(position_sqnorm(x if batched else x.unsqueeze(0), groups))
    return sqnorm if batched else sqnorm.squeeze(0)


def position_sqnorm(x: Tensor, groups: int) -> Tensor:
    """(N, channels, *size) → (N, groups, *size): Σ x² over the channels of each group, float32 or wider."""
    squares = x.to(wide_dtype(x.dtype)).square()
    if groups == x.shape[1]:
        return squares
    return squares.unflatten(1, (groups, -1)).sum(2)


def patch_scale_map(x: Tensor, geometry: Geometry) -> Tensor:
    return geometry.patch_sums(position_sqnorm(x, geometry.groups))
