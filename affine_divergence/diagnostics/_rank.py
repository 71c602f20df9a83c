# The numerical rank of the rows that a layer's step can tell apart.
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._maps import AffineMap, ConvMap, EmbeddingMap, LinearMap, ScaledMap
from affine_divergence.diagnostics._measures import Rows
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

_PART = 2**22  # elements of the rows at once
_EPS = torch.finfo(torch.float32).eps


def rank(rows: Rows, needed: tuple[bool, bool], weight: Tensor) -> tuple[Tensor, int]:
    """Singular values of X̃ above max(N, columns) · float32's eps · the largest, X̃ = [X 1] of what learns; and the most there can be.

    With groups of channels it is that of the group whose rank is least. Scaled maps have scaled rows.
    """
    columns = rows.map.width(rows.x, weight) * needed[0] + needed[1]
    if isinstance(rows.map, EmbeddingMap):
        tokens = torch.unique(rows.x)
        kept = len(tokens) if rows.map.padding is None else int((tokens != rows.map.padding).sum())
        return torch.tensor(float(kept), device=rows.g.device), min(len(rows.x), columns)
    number = rows.map.vectors(rows.g).select(rows.map.axis, 0)
    n = number.numel() // (number.shape[1] if number.dim() > 1 else 1)
    limit = min(n, columns)
    if not limit:
        return torch.zeros((), device=rows.g.device), limit
    dtype = solve_dtype(rows.x.device)
    if n <= columns:
        augmented = torch.cat(list(_parts(rows, needed, dtype)), 1)
        gram = augmented @ augmented.mT
    else:
        gram = sum((part.mT @ part for part in _parts(rows, needed, dtype)), torch.zeros((), dtype=dtype, device=rows.x.device))
    finite = torch.isfinite(gram).all()
    values = torch.linalg.eigvalsh(torch.where(finite, gram, 0.0))  # LAPACK raises on NaN
    cut = (max(n, columns) * _EPS) ** 2 * values[..., -1:]
    found = ((values > cut) & (values > 0)).sum(-1).min()
    return torch.where(finite, found.to(dtype), torch.nan), limit


def _parts(rows: Rows, needed: tuple[bool, bool], dtype: torch.dtype) -> Iterator[Tensor]:
    """X̃ of a few rows or images at a time, (groups, rows, columns)."""
    size = max(1, _PART // max(1, _entries(rows)))
    for x in rows.x.split(size):
        yield _augmented(rows.map, x.to(dtype), needed)


def _entries(rows: Rows) -> int:
    x = rows.x[:1]
    return x.numel() if rows.map.axis == -1 else _plain(rows.map, x.double()).numel()


def _augmented(map_: AffineMap, x: Tensor, needed: tuple[bool, bool]) -> Tensor:
    plain = _plain(map_, x)
    ones = torch.ones_like(plain[..., :1])
    if isinstance(map_, ScaledMap):
        t, u = (_by_group(map_, factor) for factor in map_.factors(x))
        plain, ones = t * plain, u * ones
    return torch.cat([plain] * needed[0] + [ones] * needed[1], -1)


def _plain(map_: AffineMap, x: Tensor) -> Tensor:
    inner = map_.inner if isinstance(map_, ScaledMap) else map_
    if isinstance(inner, ConvMap):
        return inner.patches(x)
    assert isinstance(inner, LinearMap)
    return x.unsqueeze(0)


def _by_group(map_: AffineMap, factor: Tensor) -> Tensor:
    return factor.unsqueeze(0).unsqueeze(-1) if map_.axis == -1 else factor.transpose(0, 1).flatten(1).unsqueeze(-1)
