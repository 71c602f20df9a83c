# Whose X̃ᵀX̃ the primal form solves with: that of the batch at hand, or its exponentially weighted average over backwards (FOOF).
#
# Layout: the moment X̃ᵀX̃ of a batch (groups, d+1, d+1), the column of ones last, d without a bias; the average S that of X̃ᵀX̃/N, with
# which N·S stands for X̃ᵀX̃. What is frozen for a while is left out of the solve, not out of the average.
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from affine_divergence.gradient._gram import moment
from affine_divergence.gradient._patch_rows import row_count
from affine_divergence.gradient._solve import Damped, damped, eye_like, solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.functional._geometry import Geometry

    Needed = tuple[bool, bool]


class Problem(Protocol):
    """(A/t + damping·I)⁻¹, and t."""

    @property
    def mean(self) -> Tensor: ...

    def solve(self, rhs: Tensor, /) -> Tensor: ...


class Moments(Protocol):
    """Where the matrix of the primal form comes from."""

    def moment(self, x: Tensor, geometry: Geometry, /) -> Tensor:
        """What this process contributes; all processes add up theirs."""

    def problem(self, matrix: Tensor, rows: int, needed: Needed, damping: float, products: torch.dtype, /) -> Problem:
        """The problem, given the sum and the number of rows of all."""


@dataclass(frozen=True)
class ThisBatch:
    """The moment of the batch, of the columns that learn."""

    needed: Needed

    def moment(self, x: Tensor, geometry: Geometry) -> Tensor:
        return _moment(x, geometry, self.needed)

    def problem(self, matrix: Tensor, rows: int, needed: Needed, damping: float, products: torch.dtype) -> Damped:
        return damped(matrix, rows, damping, products)


@dataclass
class RunningMoment:
    """What is kept from backward to backward: Σ (1 − decay)·decay^(age)·X̃ᵀX̃/N, the sum of its weights, and the last inverse."""

    total: Tensor
    weight: Tensor
    backwards: int = 0
    inverse: Inverse | None = None

    def add(self, matrix: Tensor, rows: int, decay: float) -> None:
        """Count in the moment of a batch. One that is not finite is left out: it would stay for good."""
        if self.total.shape != matrix.shape:
            raise RuntimeError(
                f"the running average has the shape {tuple(self.total.shape)}, this batch has {tuple(matrix.shape)}: "
                "the layer was changed meanwhile; call its reset_average()"
            )
        finite = torch.isfinite(matrix.sum())
        self.total = torch.where(finite, decay * self.total + (1 - decay) / rows * matrix, self.total)
        self.weight = torch.where(finite, decay * self.weight + (1 - decay), self.weight)
        self.backwards += 1

    def is_something(self) -> bool:
        """Whether there was a batch without NaN, and something in each group: else an inverse of it, kept, were NaN, or 1/damping."""
        something = (self.total.diagonal(dim1=-2, dim2=-1).sum(-1) > 0).all()
        if something.is_meta or isinstance(something, FakeTensor):
            return True  # shapes without values
        return bool(something)

    def to(self, device: torch.device) -> None:
        """Follow the layer to its device, in the dtype of the solve."""
        if self.total.device != device:
            self.total, self.weight = (t.to(device, solve_dtype(device)) for t in (self.total, self.weight))
            self.inverse = None


@dataclass(frozen=True)
class Inverse:
    """N·(N·S/t + damping·I)⁻¹ as a matrix, made once; used for another number of rows it scales with 1/N, λ growing with N instead."""

    matrix: Tensor
    mean: Tensor
    made_for: tuple[Any, ...]
    rows: int

    def solve(self, rhs: Tensor) -> Tensor:
        return self.matrix @ rhs / self.rows


@dataclass
class Averaged:
    """The average, with the batch at hand counted in where `learns`; until there is one, the moment of that batch."""

    bias: bool
    decay: float
    every: int
    learns: bool
    kept: RunningMoment | None

    def moment(self, x: Tensor, geometry: Geometry) -> Tensor:
        if self.kept is None or self.learns:
            return _moment(x, geometry, (True, self.bias))
        return x.new_zeros(0, dtype=solve_dtype(x.device))

    def problem(self, matrix: Tensor, rows: int, needed: Needed, damping: float, products: torch.dtype) -> Problem:
        if self.kept is None:
            kept = RunningMoment(torch.zeros_like(matrix), matrix.new_zeros(()))
            if not self.learns:
                return damped(self._columns(matrix, needed), rows, damping, products)
            self.kept = kept
        kept = self.kept
        kept.to(matrix.device)
        if self.learns:
            kept.add(matrix, rows, self.decay)
        made_for = needed, damping, products
        inverse = kept.inverse
        due = self.every == 1 or (self.learns and (kept.backwards - 1) % self.every == 0)
        if due or inverse is None or inverse.made_for != made_for:
            fresh = damped(self._columns(kept.total, needed) * (rows / kept.weight), rows, damping, products)
            if self.every == 1:
                kept.inverse = None
                return fresh
            inverse = Inverse(rows * fresh.solve(eye_like(fresh.matrix).expand_as(fresh.matrix)), fresh.mean, made_for, rows)
            if self.learns and kept.is_something():
                kept.inverse = inverse
        return replace(inverse, rows=rows)

    def _columns(self, matrix: Tensor, needed: Needed) -> Tensor:
        size = matrix.shape[-1]
        learning = slice(0 if needed[0] else size - 1, size if needed[1] else size - self.bias)
        return matrix[:, learning, learning]


def _moment(x: Tensor, geometry: Geometry, needed: Needed) -> Tensor:
    if needed[0]:
        return moment(x, geometry, ones=needed[1])
    rows = row_count(x, geometry)
    return x.new_full((geometry.groups, 1, 1), float(rows), dtype=solve_dtype(x.device))
