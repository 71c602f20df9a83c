# The parameterless normaliser that torch lacks as a module.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from affine_divergence.functional._arguments import check_eps
from affine_divergence.functional._norm import l2_norm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class L2Norm(torch.nn.Module):
    r"""Parameterless L2 normalisation over the last dimension: x/√(‖x‖² + ε).

    `nn.Linear` after it is `NormLikeLinear`. It is `nn.RMSNorm` without parameters divided by √d.

    Args:
        eps: added to ‖x‖² under the root; None is `torch.finfo(torch.float32).eps` whatever the dtype. At 0.0 a zero
            row stays zero and passes no gradient.

    Shape: (…, d) → (…, d), in the dtype of the input; norms are taken in float32 or wider.

    Raises:
        TypeError: the input is not a real floating-point tensor.
        ValueError: eps is negative or not finite, or the input has no dimension.

    >>> L2Norm(eps=0.0)(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """

    eps: float | None

    def __init__(self, *, eps: float | None = None) -> None:
        super().__init__()
        check_eps(eps)
        self.eps = eps

    def forward(self, input: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """(…, d) → (…, d)."""
        return l2_norm(input, self.eps)

    def extra_repr(self) -> str:
        """The option."""
        return f"eps={self.eps}"
