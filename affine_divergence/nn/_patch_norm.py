# What the PatchNorm convolutions share: the attributes of torch's layer, and the form, gain and eps of their own.
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from affine_divergence.functional._arguments import check_eps
from affine_divergence.nn._gain import resolved_gain

if TYPE_CHECKING:
    from torch import Tensor

    Forms = Mapping[str, Callable[..., Tensor]]


class PatchNorm(torch.nn.Module):
    """Not an nn.Conv*: adapters, quantisers and batch-norm folding look for that type and would be silently wrong."""

    _plain: ClassVar[type[torch.nn.modules.conv._ConvNd]]
    _forms: ClassVar[Forms]

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    padding_mode: str
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    form: str
    gain: float
    eps: float | None
    _reversed_padding_repeated_twice: list[int]

    def __init__(self, plain: tuple[Any, ...], form: str, gain: float | str, eps: float | None) -> None:
        super().__init__()
        form = _checked_form(form, self._forms, eps)
        # The torch layer itself makes the attributes, refuses what it refuses and draws the random numbers.
        torch_layer = self._plain(*plain)
        vars(self).update(vars(torch_layer) | {"form": form, "gain": resolved_gain(gain, torch_layer), "eps": eps})

    def reset_parameters(self) -> None:
        """Draw weight and bias as the torch layer does, with the same random numbers."""
        self._plain.reset_parameters(self)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options, as the torch layer shows its own."""
        eps = f", eps={self.eps}" if self.form == "norm-like" else ""
        return f"{self._plain.extra_repr(self)}, form={self.form}, gain={self.gain:g}{eps}"  # type: ignore[arg-type]

    def _normalised(self, x: Tensor, *geometry: Any) -> Tensor:
        options = {"gain": self.gain} if self.form == "affine-like" else {"gain": self.gain, "eps": self.eps}
        return self._forms[self.form](x, self.weight, self.bias, *geometry, **options)


def _checked_form(form: str, forms: Forms, eps: float | None) -> str:
    if form not in forms:
        raise ValueError(f"form must be {' or '.join(map(repr, forms))}, got {form!r}")
    if form == "affine-like" and eps is not None:
        raise ValueError(f'the affine-like form takes no eps, got {eps!r}: its root never vanishes; form="norm-like" takes one')
    check_eps(eps)
    return form
