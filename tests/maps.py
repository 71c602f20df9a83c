# The two corrected maps, each with its definition and options: what most tests here run over.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

from affine_divergence.functional import affine_like_linear, norm_like_linear


@dataclass(frozen=True)
class Map:
    kind: str
    function: Callable[..., Tensor]
    oracle: Callable[..., Tensor]
    options: dict[str, float] = field(default_factory=dict)
    bias: bool = True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.function(x, weight, bias, **self.options)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.oracle(x, weight, bias, **self.options)

    def tensors(self, d_in: int, d_out: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Any]:
        """x (*shape, d_in), weight and bias (or None) as leaves that want gradients."""
        generator = torch.Generator().manual_seed(seed)
        shapes: list[tuple[int, ...]] = [(*shape, d_in), (d_out, d_in), (d_out,)]
        drawn: list[Any] = [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]
        return drawn if self.bias else [*drawn[:2], None]

    def __str__(self) -> str:
        options = [f"{name}={value:g}" for name, value in self.options.items()]
        return "-".join([self.kind, "bias" if self.bias else "no-bias", *options])


def _affine_like(bias: bool = True, **options: float) -> Map:
    return Map("affine-like", affine_like_linear, oracles.affine_like_linear, options, bias)


def _norm_like(bias: bool = True, **options: float) -> Map:
    return Map("norm-like", norm_like_linear, oracles.norm_like_linear, options, bias)


AFFINE_LIKE = [_affine_like(bias, **options) for bias in (True, False) for options in ({}, {"gain": 1.7})]
_NORM_OPTIONS: list[dict[str, float]] = [{}, {"gain": 1.7}, {"eps": 0.0, "gain": 0.6}, {"eps": 0.3}]
NORM_LIKE = [_norm_like(bias, **options) for bias in (True, False) for options in _NORM_OPTIONS]
PLAIN = [make(bias) for make in (_affine_like, _norm_like) for bias in (True, False)]

every_map = pytest.mark.parametrize("map_", [*AFFINE_LIKE, *NORM_LIKE], ids=str)
"""Both kinds, with and without a bias, over gains and ε."""

every_kind = pytest.mark.parametrize("map_", PLAIN, ids=str)
"""Both kinds, with and without a bias, at the default options: for slow tests."""


def gradients(z: Tensor, upstream: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of ⟨z, upstream⟩ for the tensors that are there."""
    return torch.autograd.grad(z, [t for t in tensors if t is not None], upstream)
