# The sample correction of a linear layer: every row's part of the weight gradient divided by the squared norm of its input.
#
#   ∂L/∂W = Σ_i g_i x_iᵀ/(‖x_i‖² + 1)        ∂L/∂b = Σ_i g_i/(‖x_i‖² + 1)
#
# Layout: x (…, d_in), g = ∂L/∂z (…, d_out), s = (‖x‖² + 1)^(−1/2) and t = s² (…, 1), float32 or wider. What does not learn leaves the
# self term: without b the divisor is ‖x‖², where a zero row contributes 0, and without W it is 1.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from affine_divergence.functional._arguments import check_linear
from affine_divergence.functional._in_place import product
from affine_divergence.functional._rows import as_matrix, inverse_root, linear, row_sqnorm, weighted_sum, wide_dtype
from affine_divergence.gradient._carry import carried

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.gradient._carry import Pair

_EXPONENT = 14  # of sums that stay below 2^15; float16 ends below 2^16


def sample_corrected_linear(
    x: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "*rows d_out"]:
    r"""`F.linear` whose weight and bias gradients are divided, row by row, by ‖x_i‖² + 1.

    A gradient step on W and b then moves every z_i by exactly −lr · ∂L/∂z_i, plus what the other rows of the batch contribute:
    δz_i = −lr Σ_j g_j (x_j·x_i + 1)/(‖x_j‖² + 1). A plain step multiplies its own part by ‖x_i‖² + 1. The output and ∂L/∂x are
    those of `F.linear`, bit for bit, and every optimiser works on the corrected gradients

        ∂W = Σ_j g_j x_jᵀ/(‖x_j‖² + 1)        ∂b = Σ_j g_j/(‖x_j‖² + 1),        g_j = ∂L/∂z_j

    Without a bias, or with one that does not learn, the divisor is ‖x_j‖² and a zero row contributes 0. With a weight that does
    not learn it is 1. They are gradients of no loss: they are differentiated once, in reverse mode only.

    Args:
        x: (…, d_in).
        weight: (d_out, d_in).
        bias: (d_out), or None.

    Returns:
        (…, d_out), what `F.linear` returns. Squared norms are taken in float32 or wider; a row whose squared norm overflows that
        dtype (a norm above 1.8e19 in float32) contributes 0 to the gradients, and so does without a bias one whose squared norm
        underflows (a norm below 1e-23). Where everything is frozen, and in a graph made by `torch.export`, it is `F.linear`.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor.
        ValueError: the shapes do not fit.
        RuntimeError: where `F.linear` raises, as for mixed dtypes; and where weight or bias learns, in forward mode and when
            the gradients are differentiated again.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247; the example is that of F. Benzing, arXiv 2201.12250, appendix F.

    >>> import torch
    >>> x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [-1.0]])
    >>> weight = torch.zeros(1, 2, requires_grad=True)
    >>> (0.5 * (sample_corrected_linear(x, weight) - target).square()).sum().backward()
    >>> torch.nn.functional.linear(x, -weight.grad)  # (+1, −1) − (3, 0.3); a plain step moves by (+7, +2), 10 and 1 times its own
    tensor([[-2.0000],
            [-0.7000]])
    """
    check_linear(x, weight, bias)
    return carried(linear, x, weight, bias, _gradients)


def _gradients(g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
    g, x = as_matrix(g), as_matrix(x)
    if not needed[0]:
        return None, g.sum(0, dtype=wide_dtype(g.dtype))
    if g.dtype == torch.float16:
        return _float16_gradients(g, x, needed[1])
    if not needed[1]:
        s = inverse_root(row_sqnorm(x), 0.0)
        return g.mT @ product(s * x, s).to(g.dtype), None  # not s² x: at a norm of 1e-20 s² is beyond float32
    t = (row_sqnorm(x) + 1.0).reciprocal()
    if g.shape[1] <= x.shape[1]:  # the smaller factor is scaled
        g = (t * g).to(g.dtype)
        return g.mT @ x.to(g.dtype), g.sum(0, dtype=t.dtype)
    return g.mT @ (t * x).to(g.dtype), weighted_sum(t, g)


def _float16_gradients(g: Tensor, x: Tensor, biased: bool) -> Pair:
    """The same with s on both factors and a power of two per output, in float32."""
    s = inverse_root(row_sqnorm(x), float(biased))
    g = s * g  # at ‖x‖ = 300 and g = 1e-5 both t·g and the products are below 2⁻²⁴, the least of float16
    # The rows of s·x are no longer than 1, so that a sum of products is no larger than Σ|s g|.
    power = torch.exp2((_EXPONENT - g.abs().sum(0).log2().floor()).clamp(-100.0, 100.0))
    weight_grad = (power * g).half().mT @ (s * x).half()
    return weight_grad.float() / power.unsqueeze(1), (s * g).sum(0) if biased else None
