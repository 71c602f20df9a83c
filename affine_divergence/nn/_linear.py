# Structural linear layers: drop-in for torch.nn.Linear, not subclasses of it.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional import affine_like_linear, norm_like_linear
from affine_divergence.functional._arguments import check_eps
from affine_divergence.nn._gain import resolved_gain

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class _StructuralLinear(torch.nn.Module):
    # Not an nn.Linear: adapters and quantisers look for that type and would treat the map as plain affine, silently wrong.
    in_features: int
    out_features: int
    gain: float
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, device: Any, dtype: torch.dtype | None, gain: float | str
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.gain = resolved_gain(gain, self)
        self.weight = torch.nn.Parameter(torch.empty((out_features, in_features), device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does, with the same random numbers."""
        torch.nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options, as `nn.Linear` shows its own."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, gain={self.gain:g}"


class AffineLikeLinear(_StructuralLinear):
    r"""Linear layer without the affine divergence: z = gain · (W x + b)/√(‖x‖² + 1).

    Constructor, initialisation and state_dict are those of `torch.nn.Linear`; gain is not in the state_dict. The layer
    is not a subclass of `nn.Linear`, since tools that look for that type would treat it as a plain affine map. The
    formula, its gradients and its errors: `affine_divergence.functional.affine_like_linear`.

    Args:
        in_features: d_in, the size of the last dimension of x.
        out_features: d_out.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.
        gain: multiplies the whole map; a positive number, or "auto" for √(d_in + 1), kept as a number in `.gain`. At 1, the
            paper's formula, outputs are about √d_in times and steps about d_in times smaller than those of nn.Linear on
            inputs of unit variance. `affine_divergence.init.hidden_gain_` sets it for a whole model.

    Shape: x (…, d_in) → z (…, d_out).

    >>> layer = AffineLikeLinear(3, 2, gain=2.0)
    >>> layer
    AffineLikeLinear(in_features=3, out_features=2, bias=True, gain=2)
    >>> tuple(layer(torch.ones(5, 3)).shape)
    (5, 2)
    >>> AffineLikeLinear(3, 2, gain="auto").gain  # √(3 + 1)
    2.0
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gain: float | str = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, gain)

    def forward(self, input: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """(…, d_in) → (…, d_out)."""
        return affine_like_linear(input, self.weight, self.bias, gain=self.gain)


class NormLikeLinear(_StructuralLinear):
    r"""Linear layer of the normalised input: z = gain · (W x/√(‖x‖² + ε) + b).

    Constructor, initialisation and state_dict are those of `torch.nn.Linear`; gain and eps are not in the state_dict.
    The layer is not a subclass of `nn.Linear`. The formula, its gradients and its errors:
    `affine_divergence.functional.norm_like_linear`.

    Args:
        in_features: d_in, the size of the last dimension of x.
        out_features: d_out.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.
        gain: multiplies the whole map, bias included; a positive number, or "auto" for √(d_in + 1), kept as a number.
        eps: added to ‖x‖² under the root; None is `torch.finfo(torch.float32).eps` whatever the dtype, 0.0 is allowed.

    Shape: x (…, d_in) → z (…, d_out).

    >>> NormLikeLinear(3, 2)
    NormLikeLinear(in_features=3, out_features=2, bias=True, gain=1, eps=None)
    """

    eps: float | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        gain: float | str = 1.0,
        eps: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, gain)
        check_eps(eps)
        self.eps = eps

    def forward(self, input: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """(…, d_in) → (…, d_out)."""
        return norm_like_linear(input, self.weight, self.bias, gain=self.gain, eps=self.eps)

    def extra_repr(self) -> str:
        """The options, as `nn.Linear` shows its own."""
        return f"{super().extra_repr()}, eps={self.eps}"
