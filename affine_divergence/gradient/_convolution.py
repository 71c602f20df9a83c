# The convolution that a correction leaves as torch makes it: torch's own function with its options, and where its windows lie.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from affine_divergence.functional._arguments import check_conv
from affine_divergence.functional._geometry import conv_geometry

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.functional._geometry import Geometry
    from affine_divergence.gradient._carry import Product


def convolution(kernel_size: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[Product, Geometry]:
    """`F.conv1d`, `F.conv2d` or `F.conv3d` with these options, as `carried` takes it, and their geometry."""
    function = (F.conv1d, F.conv2d, F.conv3d)[len(kernel_size) - 1]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        z: Tensor = function(x, weight, bias, stride, padding, dilation, groups)
        return z

    return product, conv_geometry(kernel_size, stride, padding, dilation, groups)


def checked_convolution(
    dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Product, Geometry]:
    """The same over dims axes, where the tensors fit the options."""
    check_conv(x, weight, bias, dims, groups)
    product, geometry = convolution(weight.shape[2:], stride, padding, dilation, groups)
    geometry.check_size(x.shape[-dims:])
    return product, geometry
