# The two structural corrections of an affine layer, twins of torch.nn.functional.linear.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_eps, check_gain, check_linear
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.functional._scaled_linear import scaled_linear

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def affine_like_linear(
    x: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*rows d_out"]:
    r"""Affine map of the augmented input [x; 1] put on the unit sphere: z = gain · (W x + b)/√(‖x‖² + 1).

    A gradient step on W and b moves every z_i by exactly −lr · gain² · ∂L/∂z_i, plus what the other rows of the batch
    contribute; a plain affine layer multiplies its own part by ‖x_i‖² + 1. The map is smooth at 0, loses no degree of
    freedom and is bounded: ‖z‖ ≤ gain · ‖[W b]‖₂. Without a bias the 1 stays under the root and the self term is
    gain² · ‖x‖²/(‖x‖² + 1), below gain².

    Args:
        x: (…, d_in).
        weight: (d_out, d_in).
        bias: (d_out), or None.
        gain: multiplies the whole map, bias included. At 1 the output is about √d_in times smaller than that of
            `F.linear` on inputs of unit variance, and a step about d_in times smaller: raise the learning rate
            (`affine_divergence.matching_lr`) or take gain √(d_in + 1).

    Returns:
        (…, d_out), in the dtype that `F.linear` returns. Norms are taken in float32 or wider. Mixed dtypes, which
        `F.linear` refuses outside autocast, are promoted. A row whose squared norm overflows that dtype (a norm above
        1.8e19 in float32) comes out as 0, or as NaN where W x + b overflows too.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or gain is not a number.
        ValueError: the shapes do not fit, or gain is not positive and finite.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight, bias = torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 3.0]]), torch.tensor([1.0])
    >>> affine_like_linear(x, weight, bias)  # (2 + 6 + 1)/√(8 + 1)
    tensor([[3.]])
    """
    check_linear(x, weight, bias)
    return scaled_linear(x, weight, bias, affine_like(check_gain(gain)))


def norm_like_linear(
    x: Float[Tensor, "*rows d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*rows d_out"]:
    r"""Affine map of the normalised input: z = gain · (W x/√(‖x‖² + ε) + b).

    It is the parameterless L2 norm followed by an affine layer. At ε = 0 a gradient step moves every z_i by exactly
    −lr · 2 gain² · ∂L/∂z_i (gain² without a bias), plus what the other rows contribute. It does not see the length of
    x: one degree of freedom is lost, and with d_in = 1 only the sign of x is left.

    Args:
        x: (…, d_in).
        weight: (d_out, d_in).
        bias: (d_out), or None.
        gain: multiplies the whole map, bias included.
        eps: added to the squared norm under the root. None is `torch.finfo(torch.float32).eps` whatever the dtype, so
            that precision does not change the function. At 0.0 a zero row gives gain · b and passes no gradient to x.

    Returns:
        (…, d_out), in the dtype that `F.linear` returns. Norms are taken in float32 or wider. Mixed dtypes, which
        `F.linear` refuses outside autocast, are promoted. A row whose squared norm overflows that dtype (a norm above
        1.8e19 in float32) is treated as a zero row (NaN where W x overflows too and there is no bias), and at ε = 0 so is
        one whose squared norm underflows (a norm below 1e-23).

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or gain or eps is not a number.
        ValueError: the shapes do not fit, gain is not positive and finite, or eps is negative.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight, bias = torch.ones(1, 4), torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([1.0])
    >>> norm_like_linear(x, weight, bias)  # (1 + 3 + 2)/√4 + 1
    tensor([[4.]])
    """
    check_linear(x, weight, bias)
    return scaled_linear(x, weight, bias, norm_like(check_gain(gain), check_eps(eps)))
