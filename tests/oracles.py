# Slow, obvious definitions in float64, and the one table of tolerances.
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

FLOAT32_EPS = 2.0**-23

# The largest error relative to the largest entry: some tens of roundings in 32 and 64 bit, two or three in 16 bit.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def affine_like_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gain: float = 1.0) -> Tensor:
    """Row by row: gain · (W x + b)/√(x₁² + … + x_d² + 1)."""
    weight, shift = weight.double(), _zeros_for(weight) if bias is None else bias.double()
    return _by_row(lambda row: gain * (weight @ row + shift) / ((row * row).sum() + 1).sqrt(), x, weight)


def norm_like_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gain: float = 1.0, eps: float | None = None) -> Tensor:
    """Row by row: gain · (W x/√(x₁² + … + x_d² + ε) + b); at ε = 0 a zero row is gain · b, whatever happens to x."""
    weight, shift = weight.double(), _zeros_for(weight) if bias is None else bias.double()
    return _by_row(lambda row: gain * (weight @ l2_normalised(row, eps) + shift), x, weight)


def l2_normalised(row: Tensor, eps: float | None = None) -> Tensor:
    """x/√(x₁² + … + x_d² + ε) of one row; at ε = 0 a zero row stays zero."""
    row = row.double()
    sqnorm = (row * row).sum() + (FLOAT32_EPS if eps is None else eps)
    return 0 * row if sqnorm == 0 else row / sqnorm.sqrt()


def gram(x: Tensor, *, ones: bool) -> Tensor:
    """G_ij = x_i·x_j, plus 1 where a bias learns too."""
    return torch.stack([torch.stack([(a * b).sum() + float(ones) for b in x]) for a in x])


def close(actual: Tensor, expected: Tensor, *, tolerance: float | None = None, scale: float | None = None) -> None:
    """Equal shape, all finite, and the largest error within tolerance (of the dtype) times scale (the largest entry)."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    assert torch.isfinite(actual).all(), f"not finite: {actual}"
    if not actual.numel():
        return
    error = (actual.detach().double() - expected.detach().double()).abs().max().item()
    scale = expected.detach().abs().max().item() if scale is None else scale
    allowed = scale * (TOLERANCE[actual.dtype] if tolerance is None else tolerance)
    assert error <= allowed, f"error {error:.3g} is above {allowed:.3g}:\n{actual}\nwanted\n{expected}"


def _by_row(of_row: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    rows = x.double().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    ghost = rows.new_zeros(rows.shape[1]) + 0 * rows.sum()  # one row more, dropped again: no rows still have gradients
    flat = torch.stack([of_row(row) for row in (*rows, ghost)])[:-1]
    return flat.reshape(*x.shape[:-1], weight.shape[0])


def _zeros_for(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[0], dtype=torch.float64)
