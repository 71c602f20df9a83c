# The batch correction: gᵀ (X̃X̃ᵀ + λI)⁻¹ X̃ = gᵀ X̃ (X̃ᵀX̃ + λI)⁻¹, by the smaller of the two matrices.
#
# Layout: x (N, C, *size), g (N, C_out, *out), X̃ their patches with a 1 for the bias, of what learns only; a linear map is the case
# without axes. The dual form solves for g' = (X̃X̃ᵀ + λI)⁻¹ g and takes the gradient g'ᵀX̃; the primal form takes torch's own gradients
# and multiplies them by (X̃ᵀX̃ + λI)⁻¹.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from affine_divergence.functional._rows import as_matrix
from affine_divergence.gradient._average import Moments, ThisBatch
from affine_divergence.gradient._batch_arguments import check_damping
from affine_divergence.gradient._gram import gradient, gram
from affine_divergence.gradient._group import Group
from affine_divergence.gradient._patch_rows import patch_rows, upstream_rows
from affine_divergence.gradient._solve import damped, product_dtype, solve_dtype

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from affine_divergence.functional._geometry import Geometry


class Corrected(NamedTuple):
    """The corrected gradients of what learns, and the share of the wanted change of z that a step along them makes."""

    weight: Tensor | None
    bias: Tensor | None
    share: Tensor


@dataclass(frozen=True)
class Batch:
    """What is solved for: how the rows lie, which parameters learn, the damping, and who shares the batch."""

    geometry: Geometry
    needed: tuple[bool, bool]
    damping: float
    group: Group | None = None

    def corrected(self, g: Tensor, x: Tensor, weight: Tensor, moments: Moments | None = None) -> Corrected:
        """The gradients by this batch, or by the moments given, in the dtype of the products."""
        dtype = product_dtype(x, g)
        g, x = (self._batched(t.to(dtype), weight.dim()) for t in (g, x))
        weight = weight.to(dtype)
        rows = g.shape[0] * math.prod(g.shape[2:])
        counts = [rows] if self.group is None else self.group.counts(rows, g.device)
        if not sum(counts) or not len(weight):
            return Corrected(*self._plain(g, x, weight), g.new_full((), math.nan, dtype=torch.float32))
        columns = weight[:1].numel() * self.needed[0] + self.needed[1]
        if moments is None and self.needed[0] and sum(counts) <= columns:
            return self._dual(g, x, weight, counts)
        return self._primal(g, x, weight, sum(counts), moments or ThisBatch(self.needed))

    def _batched(self, t: Tensor, dims: int) -> Tensor:
        """Rows of any number of axes as a matrix, an image alone as a batch of one."""
        if not self.geometry.kernel_size:
            return as_matrix(t)
        return t if t.dim() == dims else t.unsqueeze(0)

    def _dual(self, g: Tensor, x: Tensor, weight: Tensor, counts: list[int]) -> Corrected:
        groups, group = self.geometry.groups, self.group
        upstream = upstream_rows(g, groups)
        if group is None:
            matrix = gram(x, self.geometry, ones=self.needed[1])
        else:
            upstream = group.gathered(upstream, counts)
            rows = group.gathered(patch_rows(x, self.geometry), counts).to(solve_dtype(x.device))
            matrix = rows @ rows.mT + float(self.needed[1])
        problem = damped(matrix, sum(counts), self.damping, g.dtype)
        upstream = upstream.to(matrix.dtype)
        solved = problem.solve(upstream)
        share = (upstream * (problem.matrix @ solved)).sum() / upstream.square().sum()
        own = solved if group is None else group.own(solved, counts)
        # In float64 too: g' is up to 1/σ² of the smallest singular value where the gradient is 1/σ. Rounded to float32 before the product,
        # rows that differ by 1e-3 moved by 0.11 of ‖g‖ too much, and nothing said so.
        joined = gradient(own / problem.mean, x, self.geometry, ones=self.needed[1])
        return Corrected(*self._parted(joined.to(g.dtype), x, weight), share.float())

    def _primal(self, g: Tensor, x: Tensor, weight: Tensor, rows: int, moments: Moments) -> Corrected:
        dtype = solve_dtype(g.device)
        plain = _joined(*self._plain(g, x, weight), self.geometry.groups).to(dtype)
        everyones, sqnorm = plain, torch.linalg.vector_norm(g, dtype=dtype).square()
        matrix = moments.moment(x, self.geometry)
        if self.group is not None:
            matrix, everyones, sqnorm = self.group.summed(matrix, plain, sqnorm)
        problem = moments.problem(matrix, rows, self.needed, self.damping, g.dtype)
        solved = problem.solve(plain.mT if everyones is plain else torch.cat([plain.mT, everyones.mT], 2)) / problem.mean
        share = (everyones.mT * solved[:, :, -everyones.shape[1] :]).sum() / sqnorm
        own = solved.narrow(2, 0, plain.shape[1]).mT.to(g.dtype)  # not a slice of all, which is_grads_batched cannot batch
        return Corrected(*self._parted(own, x, weight), share.float())

    def _plain(self, g: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.geometry.kernel_size:
            return g.mT @ x if self.needed[0] else None, g.sum(0) if self.needed[1] else None
        x, geometry = self.geometry.padded(x)
        _, weight_grad, bias_grad = geometry.convolve_backward(g, x, weight, (False, *self.needed))
        return weight_grad if self.needed[0] else None, bias_grad  # oneDNN makes that of the weight also for the bias alone

    def _parted(self, joined: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(groups, C_out/groups, columns) → the gradients of weight and bias, in the memory format of torch's own."""
        weight_grad = bias_grad = None
        if self.needed[0]:
            weight_grad = _like_torchs(joined.narrow(2, 0, weight[:1].numel()).reshape(weight.shape), x, weight)
        if self.needed[1]:
            bias_grad = joined[:, :, -1].reshape(-1).contiguous()
        return weight_grad, bias_grad


def _like_torchs(weight_grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A weight gradient in the memory format of torch's own: channels-last if the input or the weight is."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():  # vmap supports contiguous tensors only
        return weight_grad.contiguous()
    formats = {suggest_memory_format(x), suggest_memory_format(weight)} - {torch.contiguous_format}
    # Not contiguous(memory_format=...), which leaves a depthwise gradient as it is: with one channel it is contiguous in both formats.
    return weight_grad.clone(memory_format=formats.pop()) if formats else weight_grad.contiguous()


def _joined(weight_grad: Tensor | None, bias_grad: Tensor | None, groups: int) -> Tensor:
    """The inverse of `_parted`."""
    parts = [t.reshape(groups, t.shape[0] // groups, -1) for t in (weight_grad, bias_grad) if t is not None]
    return torch.cat(parts, 2)


@dataclass(frozen=True)
class BatchGradients:
    """What the functions carry to the backward."""

    geometry: Geometry
    damping: float
    group: Group | None

    @staticmethod
    def of(geometry: Geometry, damping: float, process_group: ProcessGroup | None) -> BatchGradients:
        """From the arguments of a function, checked."""
        if process_group is not None and torch.compiler.is_compiling():
            raise RuntimeError(
                "torch.compile cannot trace a process_group here; take the layer, as affine_divergence.nn.BatchCorrectedLinear, "
                "or exclude the call by torch.compiler.disable"
            )
        return BatchGradients(geometry, check_damping(damping), None if process_group is None else Group(process_group))

    def __call__(self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        corrected = Batch(self.geometry, needed, self.damping, self.group).corrected(g, x, weight)
        return corrected.weight, corrected.bias
