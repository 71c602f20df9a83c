# The batch correction of captured rows: the gradients that move all of them at once, for every map that has real or one-hot rows.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._maps import ConvMap, EmbeddingMap, LinearMap, Needed, Pair
from affine_divergence.diagnostics._measures import Rows
from affine_divergence.gradient._batch import Batch
from affine_divergence.gradient._patch_rows import LINEAR, upstream_rows
from affine_divergence.gradient._solve import damped, solve_dtype

if TYPE_CHECKING:
    from torch import Tensor


def batch_gradients(rows: Rows, weight: Tensor, needed: Needed, damping: float) -> Pair:
    """gᵀ(X̃X̃ᵀ + λI)⁻¹X̃ for weight and bias."""
    map_, x, g = rows.map, rows.x, rows.g
    if isinstance(map_, EmbeddingMap):
        return _of_tokens(map_, x, g, weight, damping), None
    if isinstance(map_, LinearMap):
        corrected = Batch(LINEAR, needed, damping).corrected(g, x, weight)
        return corrected.weight, corrected.bias
    assert isinstance(map_, ConvMap)
    if map_.geometry.transposed:
        return _of_transposed(map_, x, g, weight, needed, damping)
    x = map_.bordered(x)
    corrected = Batch(map_.geometry, needed, damping).corrected(g, x, weight)
    return corrected.weight, corrected.bias


def _of_tokens(map_: EmbeddingMap, x: Tensor, g: Tensor, weight: Tensor, damping: float) -> Tensor:
    # X̃ᵀX̃ is the diagonal of how often each token occurs; the mean squared length of the rows is 1, where some are padding below.
    total = map_.gradients(x, g, weight, (True, False))[0]
    assert total is not None
    counts = torch.bincount(x, minlength=len(weight)).unsqueeze(1).to(total.dtype)
    movable = map_.movable(x)
    return total / (counts + damping * (1.0 if movable is None else movable.to(total.dtype).mean()))


def _of_transposed(map_: ConvMap, x: Tensor, g: Tensor, weight: Tensor, needed: Needed, damping: float) -> Pair:
    dtype, groups = solve_dtype(x.device), map_.geometry.groups
    patches, upstream = map_.patches(x.to(dtype)), upstream_rows(g, groups).to(dtype)
    augmented = torch.cat([patches] * needed[0] + [torch.ones_like(patches[..., :1])] * needed[1], 2)
    n, columns = augmented.shape[1:]
    if n <= columns:
        problem = damped(augmented @ augmented.mT, n, damping, g.dtype)
        joined = (problem.solve(upstream) / problem.mean).mT @ augmented
    else:
        problem = damped(augmented.mT @ augmented, n, damping, g.dtype)
        joined = (problem.solve(augmented.mT @ upstream) / problem.mean).mT
    joined = joined.to(g.dtype)
    weight_grad = None
    if needed[0]:
        taps = joined[..., : patches.shape[2]].unflatten(2, (len(weight) // groups, *weight.shape[2:]))
        weight_grad = taps.transpose(1, 2).flatten(0, 1)
    return weight_grad, joined[..., -1].flatten() if needed[1] else None
