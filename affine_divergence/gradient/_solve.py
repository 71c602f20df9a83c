# The damped solve: (A + λI)⁻¹ applied to right-hand sides, for a positive semidefinite A that may be singular.
#
# Layout: A (groups, n, n), of N rows: X̃X̃ᵀ or X̃ᵀX̃, which have the same trace and the same eigenvalues above 0; right-hand sides
# (groups, n, k). With the mean squared length of a row t = trace(A)/N, λ = damping·t and everything is solved as
#   (A + λI)⁻¹ = (A/t + damping·I)⁻¹ / t,
# the division by t being left to the caller: rows of length 1e-25 would put t beyond float32, what is divided by it would not.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from affine_divergence.functional._rows import wide_dtype

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


@dataclass(frozen=True)
class Damped:
    """The matrix A/t of a number of rows, its t, and whether it is finite; eps is the rounding of the products it is used with."""

    matrix: Float[Tensor, "groups n n"]
    mean: Float[Tensor, "groups 1 1"]
    finite: Tensor
    rows: int
    damping: float
    eps: float

    def solve(self, rhs: Float[Tensor, "groups n k"]) -> Float[Tensor, "groups n k"]:
        """(A/t + damping·I)⁻¹ rhs; NaN where A is not finite."""
        function = self._by_cholesky if self._well_damped() else self._by_eigenvalues
        return torch.where(self.finite, function(rhs), math.nan)

    def _well_damped(self) -> bool:
        # By numbers known beforehand: cholesky_ex in float32 reports success on singular matrices, and asking a GPU for its result waits
        # for it. λ is at least damping/N of the largest eigenvalue, hence N times the rounding of the solve; and what the products
        # lose, the solve multiplies by up to 1/λ: two equal rows at damping 1e-9 came out wrong by a factor of 100.
        return self.damping >= max(self._noise(self.eps), self.rows * self._noise(torch.finfo(self.matrix.dtype).eps))

    def _noise(self, eps: float) -> float:
        # The share of the largest singular value of X̃ that roundings of its entries, all of one sign, reach is √n·eps; with a margin.
        return 16 * math.sqrt(self.matrix.shape[-1]) * eps

    def _by_cholesky(self, rhs: Tensor) -> Tensor:
        factor, _ = torch.linalg.cholesky_ex(self.matrix + self.damping * eye_like(self.matrix))
        solution: Tensor = torch.cholesky_solve(rhs, factor)
        return solution

    def _by_eigenvalues(self, rhs: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.matrix)
        rounding = 16 * math.sqrt(max(self.rows, self.matrix.shape[-1])) * torch.finfo(self.matrix.dtype).eps
        kept = values > max(self._noise(self.eps) ** 2, rounding) * values[..., -1:]
        coefficients = torch.where(kept, 1 / (torch.where(kept, values, 1.0) + self.damping), 0.0)
        solution: Tensor = vectors @ (coefficients.unsqueeze(-1) * (vectors.mT @ rhs))
        return solution


def damped(matrix: Float[Tensor, "groups n n"], rows: int, damping: float, products: torch.dtype) -> Damped:
    """The problem of a Gram matrix, or a matrix of second moments, of so many rows, for products in that dtype."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] / rows
    finite = torch.isfinite(mean)
    mean = torch.where(finite & (mean > 0), mean, 1.0)
    # LAPACK raises on NaN. A matrix of zeros has the solution 0 or, damped, one that rows of zeros make 0.
    return Damped(torch.where(finite, matrix / mean, 0.0), mean, finite, rows, damping, torch.finfo(products).eps)


def solve_dtype(device: torch.device) -> torch.dtype:
    """That of Gram matrices and of all that is done with them: float64 wherever there is one.

    λ is as small as damping/N of the largest eigenvalue (inputs far from centred, as behind a ReLU): at damping 1e-3 that is below the
    rounding of float32 from N = 8000 on, and always below that of TF32, which float32 products may silently use.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def product_dtype(*tensors: Tensor) -> torch.dtype:
    """That of the products with x and g: float32 or wider."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return wide_dtype(dtype)


def eye_like(matrix: Tensor) -> Tensor:
    """The identity of one group."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
