# The batch correction of a linear map: torch.nn.functional.linear, with the weight gradient that moves all rows at once as they should.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_linear
from affine_divergence.functional._rows import linear
from affine_divergence.gradient._batch import BatchGradients
from affine_divergence.gradient._carry import carried
from affine_divergence.gradient._patch_rows import LINEAR

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from torch.distributed import ProcessGroup


def batch_corrected_linear(
    x: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    *,
    damping: float = 1e-3,
    process_group: ProcessGroup | None = None,
) -> Float[Tensor, "*rows d_out"]:
    r"""`F.linear`, whose weight and bias get the gradient that moves every row by its own −lr · ∂L/∂z_i at once.

    With X̃ the rows [x_i; 1], g the rows ∂L/∂z_i and λ = damping · trace(X̃X̃ᵀ)/N, the gradient of [W b] is the ridge solution

        gᵀ (X̃X̃ᵀ + λI)⁻¹ X̃   (dual, N×N)   =   gᵀ X̃ (X̃ᵀX̃ + λI)⁻¹   (primal, (d+1)×(d+1)),

    by the smaller matrix of the two: dual where N ≤ d + 1, at a cost of N²(d + o) + N³/6 multiplications, else primal,
    (N + o) d² + d³/6; where F.linear and its gradients take 3 N d o. Where the damping is too small for Cholesky's
    factorisation (below) an eigendecomposition takes its place, which is several times dearer. Output
    and ∂L/∂x are bit-identical to those of `F.linear`. At damping 0 and with no more rows than d + 1, all independent, a
    gradient step changes each z_i by exactly −lr · ∂L/∂z_i; a large damping gives the plain gradient over λ. Without a bias,
    or with a frozen one, the rows are x_i; with a frozen weight only the 1 is left.

    Gram matrices and their solves are in float64 (float32 on devices without), whatever the dtypes. Where the damping is
    below 16√n · eps, n the size of the matrix and eps that of the dtype, directions in which singular values of X̃ are below
    that share of the largest (in float64: below √(16√n · eps)) get no gradient: rows tell them apart by their rounding alone,
    or are very much shorter than others. With any damping one very long row raises λ for all. Several calls, and
    micro-batches, are corrected each by its own rows and their gradients added. NaN or inf in x gives NaN.

    Args:
        x: (…, d_in); rows are all but the last axis.
        weight: (d_out, d_in).
        bias: (d_out), or None.
        damping: λ relative to the mean squared length of the rows; 0.0 is the least-norm solution.
        process_group: the processes whose rows are one batch, as under DistributedDataParallel, which averages what each of
            them contributes. They wait for each other in the backward. None: nothing is communicated.

    Returns:
        (…, d_out), what `F.linear` returns.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, damping is not a number, or process_group is none.
        ValueError: the shapes do not fit, or damping is negative or not finite.
        RuntimeError: in forward mode, or where a gradient of it is differentiated again; with a process_group, inside
            torch.compile (`affine_divergence.nn.BatchCorrectedLinear` takes one there).

    Source: the ridge solution of the ideal update of G. Bird, The Affine Divergence, arXiv 2512.22247; F. Benzing, Gradient
    Descent on Neurons and its Link to Approximate Second-Order Optimization, arXiv 2201.12250.

    >>> import torch
    >>> x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [-1.0]])
    >>> weight = torch.zeros(1, 2, requires_grad=True)
    >>> (0.5 * (batch_corrected_linear(x, weight, damping=0.0) - target) ** 2).sum().backward()
    >>> (x @ -weight.grad.mT).round(decimals=4)  # the change of z at lr 1: what is wanted; the plain gradient gives 7 and 2
    tensor([[ 1.],
            [-1.]])
    >>> weight.grad = None
    >>> (0.5 * (batch_corrected_linear(x, weight, damping=0.0) - target) ** 2).mean().backward()  # the mean loss: half of it
    >>> (x @ -weight.grad.mT).round(decimals=4)
    tensor([[ 0.5000],
            [-0.5000]])
    """
    check_linear(x, weight, bias)
    return carried(linear, x, weight, bias, BatchGradients.of(LINEAR, damping, process_group))
