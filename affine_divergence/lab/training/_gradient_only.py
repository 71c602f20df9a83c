# The gradient-only corrections of an affine layer, for the replicas of a stack that use them: what stands for its inputs in the update.
#
# With the rows X̃ = [x 1] and the upstream gradients g of a batch of N the weights step by X̃ᵀg; corrected, by Pᵀg with
#     sample   P = each row of X̃ over its squared norm
#     batch    P = (X̃X̃ᵀ + λ)⁻¹X̃, or X̃(X̃ᵀX̃ + λ)⁻¹, which is the same, where that matrix is the smaller; λ = damping · mean ‖x̃‖²
#     foof     P = X̃(N·S + λ)⁻¹, S the running average of X̃ᵀX̃/N by FOOF_DECAY, λ = damping · trace S; inverted at every FOOF_REFRESH-th step
# Layout: X̃ and P (K, N, d + 1), damping (K, 1) or a number. A matrix that rounding makes indefinite gives NaN: that run has diverged.
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from affine_divergence.lab.trial import FOOF_DECAY, FOOF_REFRESH, GRADIENT_ONLY, Trial

Damping = Tensor | float


def augmented(x: Tensor) -> Tensor:
    """[x 1]."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


def sample_rows(rows: Tensor) -> Tensor:
    """P of sample."""
    return rows / rows.square().sum(-1, keepdim=True)


def batch_rows(rows: Tensor, damping: Damping) -> Tensor:
    """P of batch."""
    count, features = rows.shape[-2:]
    if count <= features:
        return torch.cholesky_solve(rows, batch_factor(rows, damping))
    return torch.cholesky_solve(rows.mT, _factor(rows.mT @ rows, damping / count)).mT


def batch_factor(rows: Tensor, damping: Damping) -> Tensor:
    """Cholesky's factor of X̃X̃ᵀ + λ, (K, N, N), which may be applied to g in place of X̃."""
    return _factor(rows @ rows.mT, damping / rows.shape[-2])


class Foof:
    """P of foof, for each of some dampings, which share the average."""

    def __init__(self, dampings: Sequence[Damping]) -> None:
        self._dampings = dampings
        self._steps = 0
        self._sum: Tensor
        self._inverses: list[Tensor]

    def keep(self, places: Sequence[int]) -> Foof:
        """Go on with some of the dampings."""
        self._dampings = [self._dampings[i] for i in places]
        if self._steps:
            self._inverses = [self._inverses[i] for i in places]
        return self

    def keep_replicas(self, index: Tensor) -> None:
        """Go on with some of the replicas, where each has an average of its own."""
        self._dampings = [damping[index] if isinstance(damping, Tensor) else damping for damping in self._dampings]
        if self._steps:
            self._sum, self._inverses = self._sum[index], [inverse[index] for inverse in self._inverses]

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """P for each damping; the rows become part of the average first."""
        count = rows.shape[-2]
        if self._steps == 0:
            self._sum, self._weight = rows.mT @ rows / count, 1.0
        else:
            self._sum.baddbmm_(rows.mT, rows, beta=FOOF_DECAY, alpha=1.0 / count)
            self._weight = 1.0 + FOOF_DECAY * self._weight
        if self._steps % FOOF_REFRESH == 0:
            average = self._sum / self._weight
            self._inverses = [torch.cholesky_inverse(_factor(average, damping / count)) for damping in self._dampings]
        self._steps += 1
        return [rows @ inverse / count for inverse in self._inverses]


class Corrections:
    """P of replicas in the order of `GRADIENT_ONLY`, each with a layer and a damping of its own."""

    def __init__(self, trials: Sequence[Trial], like: Tensor) -> None:
        dampings = {
            method: torch.tensor([trial.damping or 0.0 for trial in trials if trial.method == method], dtype=torch.float64).to(like)
            for method in GRADIENT_ONLY
        }
        self._counts = [len(own) for own in dampings.values()]
        self._methods = [method for method, own in dampings.items() for _ in own]
        self._damping = dampings["batch"].view(-1, 1)
        self._foof = Foof([dampings["foof"].view(-1, 1)])

    def keep(self, replicas: Tensor) -> None:
        """Go on with some of the replicas, in the order in which they stand."""
        chosen = replicas.tolist()
        starts = dict(zip(GRADIENT_ONLY, itertools.accumulate(self._counts, initial=0), strict=False))
        kept = {method: [i - starts[method] for i in chosen if self._methods[i] == method] for method in GRADIENT_ONLY}
        self._damping = self._damping[kept["batch"]]
        self._foof.keep_replicas(torch.tensor(kept["foof"], dtype=torch.long, device=self._damping.device))
        self._counts, self._methods = [len(own) for own in kept.values()], [self._methods[i] for i in chosen]

    def __call__(self, rows: Tensor) -> Tensor:
        """X̃ (K, N, d + 1) → P."""
        of_sample, of_batch, of_foof = rows.split(self._counts)
        parts = []
        if len(of_sample):
            parts.append(sample_rows(of_sample))
        if len(of_batch):
            parts.append(batch_rows(of_batch, self._damping))
        if len(of_foof):
            parts += self._foof(of_foof)
        return torch.cat(parts)


def _factor(matrix: Tensor, share: Damping) -> Tensor:
    # Cholesky's, of the matrix with that share of its trace added to its diagonal.
    damped = matrix.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal += share * diagonal.sum(-1, keepdim=True)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(damped)
    factor[info != 0] = torch.nan
    return factor
