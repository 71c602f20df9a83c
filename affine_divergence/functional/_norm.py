# x/‖x‖: the parameterless L2 normalisation.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_eps, check_floating
from affine_divergence.functional._rows import inverse_norm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def l2_norm(x: Float[Tensor, "*rows d"], eps: float | None = None) -> Float[Tensor, "*rows d"]:
    """x/√(‖x‖² + ε) over the last dimension, in the dtype of x; ε as in `norm_like_linear`."""
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have the shape (…, d), got (); a single number has no direction")
    x = x.contiguous()  # the order of a sum must not depend on strides
    return (x * inverse_norm(x, check_eps(eps))).to(x.dtype)
