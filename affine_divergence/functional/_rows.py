# Rows: as a matrix, their weighted sum, squared norms and inverse norms, in float32 or wider whatever the input's dtype.
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

DEFAULT_EPS: float = torch.finfo(torch.float32).eps
"""The norm-like ε where none is given: that of float32 for every dtype, so that precision does not change the function."""


_PART = 128  # rows


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    # In bfloat16 the "+1" is lost above 256, in float16 the sum of squares overflows at eight values of 100.
    return torch.promote_types(dtype, torch.float32)


def forward_mode() -> bool:
    """Whether a forward derivative is being taken, by `torch.func.jvp` and its kin or in a `dual_level`."""
    return torch.autograd.forward_ad._current_level >= 0


def differentiable() -> bool:
    """Whether what is computed now may be differentiated, or is only being traced: then in plain expressions alone."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling() or forward_mode()


def as_matrix(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "n d"]:
    """All rows, whatever the axes before them."""
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def weighted_sum(t: Float[Tensor, "n 1"], rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Σ t·row in the dtype of t, without a temporary of the size of the rows."""
    # A product tᵀ·rows sums in sequence, which over 70,000 rows lost three digits: hence in parts, whose sums are then added.
    parts = [of_t.mT @ of_rows.to(t.dtype) for of_t, of_rows in zip(t.split(_PART), rows.split(_PART), strict=True)]
    return torch.cat(parts).sum(0)


def row_sqnorm(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows 1"]:
    """‖x‖² of every row, float32 or wider."""
    if differentiable():
        return x.to(wide_dtype(x.dtype)).square().sum(-1, keepdim=True)
    # One pass without a temporary: 1.0 ms against 5.6 ms at 4096 × 1024. Not differentiable twice at a zero row, hence only here.
    norm: Tensor = torch.linalg.vector_norm(x.contiguous(), dim=-1, keepdim=True, dtype=wide_dtype(x.dtype))
    return norm.square()


def inverse_norm(x: Float[Tensor, "*rows d"], offset: float) -> Float[Tensor, "*rows 1"]:
    """(‖x‖² + offset)^(−1/2) of every row; with offset 0 a zero row gets 0, and so do its gradients."""
    return inverse_root(row_sqnorm(x), offset)


def inverse_root(sqnorm: Tensor, offset: float) -> Tensor:
    """(sqnorm + offset)^(−1/2); with offset 0 a zero gets 0, and so do its gradients."""
    if offset > 0.0:
        return (sqnorm + offset).rsqrt_()
    nonzero = sqnorm > 0
    # Not rsqrt: its derivative cubes the result, beyond float32 for a norm of 1e-13.
    return torch.where(nonzero, torch.where(nonzero, sqnorm, 1.0).sqrt().reciprocal(), 0.0)
