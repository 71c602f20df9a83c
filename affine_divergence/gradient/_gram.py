# The products of the augmented rows X̃ = [X 1], in the dtype of the solve, never unfolding all of X at once.
#
# Layout: x (N, C, *size); the Gram matrix X̃X̃ᵀ (groups, rows, rows), the moment X̃ᵀX̃ (groups, d+1, d+1), the gradient gᵀX̃ of rows g
# (groups, rows, o) of that dtype (groups, o, d+1); the column of ones last.
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from affine_divergence.gradient._patch_rows import column_parts, row_count, row_parts
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.functional._geometry import Geometry


def gram(x: Float[Tensor, "n c *size"], geometry: Geometry, *, ones: bool) -> Float[Tensor, "groups rows rows"]:
    """X̃X̃ᵀ, with or without the ones. Peak memory: the result, and a part of the columns of X."""
    rows = row_count(x, geometry)
    total = x.new_full((geometry.groups, rows, rows), float(ones), dtype=solve_dtype(x.device))
    for part in column_parts(x, geometry, total.dtype):
        total = torch.baddbmm(total, part, part.mT)
    return total


def gradient(g: Float[Tensor, "groups rows o"], x: Float[Tensor, "n c *size"], geometry: Geometry, *, ones: bool) -> Tensor:
    """gᵀX̃, with or without the ones. Peak memory: the result twice, and a part of the columns of X."""
    parts = [g.mT @ part for part in column_parts(x, geometry, g.dtype)]
    return torch.cat([*parts, g.sum(1).unsqueeze(2)] if ones else parts, 2)


def moment(x: Float[Tensor, "n c *size"], geometry: Geometry, *, ones: bool) -> Float[Tensor, "groups d d"]:
    """X̃ᵀX̃, with or without the ones. Peak memory: the result, and the rows of a part of the images."""
    size = x.shape[1] // geometry.groups * math.prod(geometry.kernel_size)
    total = x.new_zeros((geometry.groups, size, size), dtype=solve_dtype(x.device))
    sums = total.new_zeros((geometry.groups, size, 1))
    for part in row_parts(x, geometry, total.dtype):
        total = torch.baddbmm(total, part.mT, part)
        if ones:
            sums = sums + part.sum(1).unsqueeze(2)
    if not ones:
        return total
    number = total.new_full((geometry.groups, 1, 1), row_count(x, geometry))
    return torch.cat([torch.cat([total, sums], 2), torch.cat([sums.mT, number], 2)], 1)
