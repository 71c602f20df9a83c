# The affine maps that layers are: what a change of the parameters does to each row of the output, and what gradients the rows add up to.
#
# Layout: x is batched, (N, d), (N, C, *size) or token numbers (N,); z and g are the map's output and ∂L/∂z. `vectors` makes the axis along
# which one row's output lies explicit, at `axis`: (N, o) for a linear map, (N, groups, C_out/groups, *out) for a convolution. What there is
# one of for each row has that shape without the axis. All of it in one floating dtype, under no_grad.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from affine_divergence.functional._channels import channel_sqnorm
from affine_divergence.functional._geometry import Geometry
from affine_divergence.functional._rows import row_sqnorm
from affine_divergence.functional._scale import Scale
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor | None", "Tensor | None"]
Needed = tuple[bool, bool]


class AffineMap(Protocol):
    """z = W·row + b of rows that x is made of, or a scaled one."""

    @property
    def axis(self) -> int: ...

    def vectors(self, z: Tensor, /) -> Tensor: ...

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, /) -> Tensor:
        """The vectors of W·row + b, without what is None: linear in both, so that of a change it is the change of z."""

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed, /) -> Pair:
        """Σ g_i row_iᵀ and Σ g_i, of the vectors g."""

    def self_term(self, x: Tensor, g: Tensor, needed: Needed, /) -> Tensor:
        """G_ii: ‖row‖² + 1, of what learns."""

    def movable(self, x: Tensor, /) -> Tensor | None:
        """Which rows the parameters reach; None: all."""

    def width(self, x: Tensor, weight: Tensor, /) -> int:
        """d, the length of a row."""


class _OfRealRows:
    def movable(self, x: Tensor) -> Tensor | None:
        return None

    def width(self, x: Tensor, weight: Tensor) -> int:
        return weight[0].numel()


@dataclass(frozen=True)
class LinearMap(_OfRealRows):
    """x (N, d)."""

    axis = -1

    def vectors(self, z: Tensor) -> Tensor:
        return z

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            assert bias is not None
            return bias.expand(x.shape[0], -1)
        return F.linear(x, weight, bias)

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed) -> Pair:
        return g.mT @ x if needed[0] else None, g.sum(0) if needed[1] else None

    def sqnorm(self, x: Tensor) -> Tensor:
        """‖row‖²."""
        return row_sqnorm(x).squeeze(-1)

    def self_term(self, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
        return _self_term(self, x, g, needed)


@dataclass(frozen=True)
class EmbeddingMap:
    """Token numbers (N,), which stand for one-hot rows."""

    padding: int | None
    axis = -1

    def vectors(self, z: Tensor) -> Tensor:
        return z

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        assert weight is not None
        return F.embedding(x, weight)

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed) -> Pair:
        if self.padding is not None:
            g = g * (x != self.padding).unsqueeze(-1)
        return g.new_zeros(weight.shape).index_add_(0, x, g), None

    def self_term(self, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
        return torch.ones_like(x, dtype=g.dtype) if self.padding is None else (x != self.padding).to(g.dtype)

    def width(self, x: Tensor, weight: Tensor) -> int:
        return len(weight)

    def movable(self, x: Tensor) -> Tensor | None:
        return None if self.padding is None else x != self.padding


@dataclass(frozen=True)
class ConvMap(_OfRealRows):
    """x (N, C, *size), plain or transposed; `border` is padding with anything but zeros, done first: its amounts as of F.pad, its mode."""

    geometry: Geometry
    border: tuple[list[int], str] | None = None
    axis = 2

    def vectors(self, z: Tensor) -> Tensor:
        vectors: Tensor = z.unflatten(1, (self.geometry.groups, -1))
        return vectors

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            assert bias is not None
            size = self.bordered(x[:1]).shape[2:]
            shape = (x.shape[0], len(bias), *self.geometry.output_size(size))
            return self.vectors(bias.view(-1, *[1] * len(size)).expand(shape))
        x, geometry = self.geometry.padded(self.bordered(x))
        return self.vectors(geometry.convolve(x, weight, bias))

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed) -> Pair:
        g = g.flatten(1, 2)
        bias_grad = g.transpose(0, 1).flatten(1).sum(1) if needed[1] else None  # oneDNN makes that of the weight also for the bias alone
        if not needed[0]:
            return None, bias_grad
        x, geometry = self.geometry.padded(self.bordered(x))
        return geometry.convolve_backward(g, x, weight, (False, True, False))[1], bias_grad

    def sqnorm(self, x: Tensor) -> Tensor:
        """‖patch‖² of each position and group."""
        x = self.bordered(x)
        return self.geometry.patch_sums(channel_sqnorm(x, self.geometry.groups))

    def self_term(self, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
        return _self_term(self, x, g, needed)

    def width(self, x: Tensor, weight: Tensor) -> int:
        return x.shape[1] // self.geometry.groups * math.prod(self.geometry.kernel_size)

    def patches(self, x: Tensor) -> Tensor:
        """The rows themselves (groups, N·positions, C/groups·taps): outputs of the same windows for weights of one entry each."""
        x, geometry = self.geometry.padded(self.bordered(x))
        channels, taps = x.shape[1] // geometry.groups, math.prod(geometry.kernel_size)
        entries = torch.eye(channels * taps, dtype=x.dtype, device=x.device).view(-1, channels, *geometry.kernel_size)
        if geometry.transposed:
            entries = entries.transpose(0, 1)
        weight = entries.repeat(geometry.groups, *[1] * (entries.dim() - 1))
        rows = self.vectors(geometry.convolve(x, weight, None)).flatten(3)
        return rows.permute(1, 0, 3, 2).flatten(1, 2)

    def bordered(self, x: Tensor) -> Tensor:
        """With the padding that is done first."""
        return x if self.border is None else F.pad(x, self.border[0], mode=self.border[1])


@dataclass(frozen=True)
class ScaledMap(_OfRealRows):
    """z = t·(W·row) + u·b, t and u by the norm of each row: the affine-like and the norm-like map."""

    inner: LinearMap | ConvMap
    scale: Scale

    @property
    def axis(self) -> int:
        return self.inner.axis

    def vectors(self, z: Tensor) -> Tensor:
        return self.inner.vectors(z)

    def width(self, x: Tensor, weight: Tensor) -> int:
        return self.inner.width(x, weight)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The t and u of each row."""
        _, t = self.scale(self.inner.sqnorm(x))
        return t, t if self.scale.scales_bias else torch.full_like(t, self.scale.gain)

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        t, u = self.factors(x)
        z = None if weight is None else t.unsqueeze(self.axis) * self.inner.product(x, weight, None)
        if bias is None:
            assert z is not None
            return z
        shift = u.unsqueeze(self.axis) * self.inner.product(x, None, bias)
        return shift if z is None else z + shift

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed) -> Pair:
        t, u = self.factors(x)
        of_weight = self.inner.gradients(x, t.unsqueeze(self.axis) * g, weight, (True, False))[0] if needed[0] else None
        return of_weight, self.inner.gradients(x, u.unsqueeze(self.axis) * g, weight, (False, True))[1] if needed[1] else None

    def self_term(self, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
        t, u = self.factors(x)
        return float(needed[0]) * t.square() * self.inner.sqnorm(x) + float(needed[1]) * u.square()


@dataclass(frozen=True)
class SampleMap(_OfRealRows):
    """A plain map whose gradients are divided, row by row, by G_ii; where that is 0 a row contributes nothing."""

    inner: LinearMap | ConvMap

    @property
    def axis(self) -> int:
        return self.inner.axis

    def vectors(self, z: Tensor) -> Tensor:
        return self.inner.vectors(z)

    def product(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.inner.product(x, weight, bias)

    def gradients(self, x: Tensor, g: Tensor, weight: Tensor, needed: Needed) -> Pair:
        dtype = solve_dtype(g.device)  # 1/G_ii of a row of length 1e-20 is beyond float32, g x/G_ii is not
        wide_x, wide_g = x.to(dtype), g.to(dtype)
        own = self.inner.self_term(wide_x, wide_g, needed)
        divided = torch.where(own > 0, own.reciprocal(), 0.0).unsqueeze(self.axis) * wide_g
        of_weight, of_bias = self.inner.gradients(wide_x, divided, weight.to(dtype), needed)
        return None if of_weight is None else of_weight.to(g.dtype), None if of_bias is None else of_bias.to(g.dtype)

    def self_term(self, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
        return (self.inner.self_term(x, g, needed) > 0).to(g.dtype)


def _self_term(map_: LinearMap | ConvMap, x: Tensor, g: Tensor, needed: Needed) -> Tensor:
    if not needed[0]:  # what x was does not count then: it may have been changed in place
        return g.new_full(g.select(map_.axis, 0).shape, float(needed[1]))
    return map_.sqnorm(x) + float(needed[1])
