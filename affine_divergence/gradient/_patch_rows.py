# The rows that an affine map sees: those of its input, or the patches of a convolution, group by group.
#
# Layout: x (N, C, *size), g (N, C_out, *out); rows of x (groups, N·positions, C/groups·taps) in the order of the weight's own entries,
# rows of g (groups, N·positions, C_out/groups). A linear map is the case without axes: x (N, d), g (N, o), one group.
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from affine_divergence.functional._geometry import Geometry

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LINEAR = Geometry((), (), (), (), 1, (), ())

_PART = 2**22  # elements unfolded at once: 32 MiB in float64


def row_count(x: Float[Tensor, "n c *size"], geometry: Geometry) -> int:
    """N: the images times the positions of one."""
    return x.shape[0] * math.prod(geometry.output_size(x.shape[2:]))


def row_parts(x: Float[Tensor, "n c *size"], geometry: Geometry, dtype: torch.dtype) -> Iterator[Float[Tensor, "groups n d"]]:
    """All rows, those of a few images at a time."""
    for images in x.split(_number(x[:1], geometry)):
        yield patch_rows(images.to(dtype), geometry)


def column_parts(x: Float[Tensor, "n c *size"], geometry: Geometry, dtype: torch.dtype) -> Iterator[Float[Tensor, "groups rows n"]]:
    """All columns of the rows, those of a few channels of each group at a time."""
    x = x.reshape(x.shape[0], geometry.groups, x.shape[1] // geometry.groups, *x.shape[2:])
    for channels in x.split(_number(x[:, :, :1].flatten(1, 2), geometry), 2):
        yield patch_rows(channels.flatten(1, 2).to(dtype), geometry)


def patch_rows(x: Float[Tensor, "n c *size"], geometry: Geometry) -> Float[Tensor, "groups rows d"]:
    """All rows at once."""
    out, taps, channels = geometry.output_size(x.shape[2:]), math.prod(geometry.kernel_size), x.shape[1] // geometry.groups
    shape = geometry.groups, row_count(x, geometry), channels * taps
    ends = [end for p, e in zip(reversed(geometry.padding), reversed(geometry.extra), strict=True) for end in (p, p + e)]
    x = F.pad(x, ends) if any(ends) else x
    x = x.reshape(x.shape[0], geometry.groups, channels, *x.shape[2:])
    for axis, (k, s, d) in enumerate(zip(geometry.kernel_size, geometry.stride, geometry.dilation, strict=True), start=3):
        x = x.unfold(axis, (k - 1) * d + 1, s)[..., ::d]
    axes = range(3, 3 + len(out))
    return x.permute(1, 0, *axes, 2, *(axis + len(out) for axis in axes)).reshape(shape)


def upstream_rows(g: Float[Tensor, "n c_out *out"], groups: int) -> Float[Tensor, "groups rows o"]:
    """The rows of g."""
    positions, channels = math.prod(g.shape[2:]), g.shape[1] // groups
    rows = g.reshape(g.shape[0], groups, channels, positions).permute(1, 0, 3, 2)
    return rows.reshape(groups, g.shape[0] * positions, channels)


def _number(one: Tensor, geometry: Geometry) -> int:
    of_one = row_count(one, geometry) * one.shape[1] * math.prod(geometry.kernel_size)
    return max(1, _PART // max(1, of_one))
