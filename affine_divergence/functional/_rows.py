# Rows: as a matrix, their weighted sum, squared norms and inverse norms, in float32 or wider whatever the input's dtype.
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

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


def composes() -> bool:
    """Whether a map must be made of torch's operations alone: for a compiler, a tracer or a forward derivative."""
    return torch.compiler.is_compiling() or forward_mode() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def differentiable() -> bool:
    """Whether what is computed now may be differentiated, or is only being traced: then in plain expressions alone."""
    return torch.is_grad_enabled() or composes()


def as_matrix(rows: Float[Tensor, "*rows d"]) -> Float[Tensor, "n d"]:
    """All rows, whatever the axes before them."""
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def linear(x: Float[Tensor, "*rows d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None = None) -> Tensor:
    """`F.linear`, which of a single row changes the shape of its product in place and gets tangents under vmap wrong."""
    return F.linear(x, weight, bias) if x.dim() > 1 else F.linear(x.unsqueeze(0), weight, bias).squeeze(0)


def weighted_sum(t: Float[Tensor, "n 1"], rows: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Σ t·row in the dtype of t, without a temporary of the size of the rows."""
    # A product tᵀ·rows sums in sequence, which over 70,000 rows lost three digits: hence in parts, whose sums are then added.
    parts = [of_t.mT @ of_rows.to(t.dtype) for of_t, of_rows in zip(t.split(_PART), rows.split(_PART), strict=True)]
    return torch.cat(parts).sum(0)


def row_sqnorm(x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows 1"]:
    """‖x‖² of every row, float32 or wider: the same bits whether or not a graph of it is recorded."""
    if composes():
        return x.to(wide_dtype(x.dtype)).square().sum(-1, keepdim=True)
    sqnorm: Tensor = _RowSqnorm.apply(x) if torch.is_grad_enabled() else _row_sqnorm(x)
    return sqnorm


def _row_sqnorm(x: Tensor) -> Tensor:
    # One pass without a temporary: 1.0 ms against 5.6 ms at 4096 × 1024.
    norm: Tensor = torch.linalg.vector_norm(x.contiguous(), dim=-1, keepdim=True, dtype=wide_dtype(x.dtype))
    return norm.square()


class _RowSqnorm(torch.autograd.Function):
    # torch's derivative of vector_norm cannot be differentiated again at a zero row.

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _row_sqnorm(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = (2.0 * upstream[0] * x).to(x.dtype)
        return gradient


def inverse_norm(x: Float[Tensor, "*rows d"], offset: float) -> Float[Tensor, "*rows 1"]:
    """(‖x‖² + offset)^(−1/2) of every row; with offset 0 a zero row gets 0, and so do its gradients."""
    return inverse_root(row_sqnorm(x), offset)


def inverse_root(sqnorm: Tensor, offset: float) -> Tensor:
    """(sqnorm + offset)^(−1/2); with offset 0 a zero gets 0, and so do its gradients."""
    if offset > 0.0:
        return (sqnorm + offset).rsqrt()
    nonzero = sqnorm > 0
    # Not rsqrt: its derivative cubes the result, beyond float32 for a norm of 1e-13.
    return torch.where(nonzero, torch.where(nonzero, sqnorm, 1.0).sqrt().reciprocal(), 0.0)
