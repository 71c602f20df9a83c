# The gradients that the captured rows add up to, by parameter.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._change import Parameter
from affine_divergence.diagnostics._maps import Pair
from affine_divergence.diagnostics._told import Told
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

Gradients = dict[Parameter, "Tensor"]
_PART = 2**15  # numbers


def total(calls: Sequence[Told], of_call: Callable[[Told], Pair]) -> Gradients:
    """Sums by parameter over all calls of all layers that have a part in it."""
    sums: Gradients = {}
    for one in calls:
        for part, gradient in zip(one.layer.parts, of_call(one), strict=True):
            if part is None or gradient is None:
                continue
            parameter = part.parameter
            if parameter not in sums and part.cut is None and not part.transposed:
                sums[parameter] = gradient
                continue
            if parameter not in sums:
                sums[parameter] = torch.zeros_like(parameter, dtype=gradient.dtype)
            part.of(sums[parameter]).add_(gradient)
    return sums


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ in float64, some numbers at a time."""
    total = torch.zeros((), dtype=solve_dtype(a.device), device=a.device)
    for x, y in zip(a.reshape(-1).split(_PART), b.reshape(-1).split(_PART), strict=True):
        total += x.to(total.dtype).dot(y.to(total.dtype))
    return total


def plain(one: Told) -> Pair:
    """Σ g_i row_iᵀ and Σ g_i: what gradient descent would follow without a correction of the gradient."""
    return one.rows.gradients(one.weight, one.needed)
