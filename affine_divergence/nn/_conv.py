# PatchNorm convolutions: drop-in for torch.nn.Conv1d, Conv2d and Conv3d, not subclasses of them.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

import affine_divergence.functional as AF
from affine_divergence.functional._arguments import check_eps, check_gain

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("affine-like", "norm-like")


class PatchNormConvNd(torch.nn.Module):
    _plain: ClassVar[type[torch.nn.Module]]
    _affine_like: ClassVar[Callable[..., Tensor]]
    _norm_like: ClassVar[Callable[..., Tensor]]

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
    _reversed_padding_repeated_twice: list[int]
    form: str
    gain: float
    eps: float | None

    def __init__(self, arguments: tuple[Any, ...], form: str, gain: float, eps: float | None) -> None:
        super().__init__()
        # Every attribute, check and random number is that of torch's own layer, which is made and taken apart.
        self.__dict__.update(self._plain(*arguments).__dict__)
        self.form, self.gain, self.eps = form, check_gain(gain), eps
        check_eps(eps)

    def reset_parameters(self) -> None:
        """Draw weight and bias as the torch layer does, with the same random numbers."""
        self._plain.reset_parameters(self)

    def extra_repr(self) -> str:
        """The options, as the torch layer shows its own."""
        return f"{self._plain.extra_repr(self)}, form={self.form}, gain={self.gain:g}"

    def _map(self, x: Tensor, *geometry: Any) -> Tensor:
        if self.form == "affine-like":
            return type(self)._affine_like(x, self.weight, self.bias, *geometry, gain=self.gain)
        return type(self)._norm_like(x, self.weight, self.bias, *geometry, gain=self.gain, eps=self.eps)


class PatchNormConv2d(PatchNormConvNd):
    """2d convolution divided by the norm of each patch."""

    _plain = torch.nn.Conv2d
    _affine_like, _norm_like = staticmethod(AF.affine_like_conv2d), staticmethod(AF.norm_like_conv2d)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        form: str = "affine-like",
        gain: float = 1.0,
        eps: float | None = None,
    ) -> None:
        plain = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        super().__init__(plain, form, gain, eps)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) → (N, C_out, H_out, W_out)."""
        x, padding = input, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), "valid"
        return self._map(x, self.stride, padding, self.dilation, self.groups)
