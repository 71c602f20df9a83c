# Checks of arguments, and the errors users read when one is wrong.
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional._rows import DEFAULT_EPS

if TYPE_CHECKING:
    from torch import Tensor


_LARGEST = sys.float_info.max
_SIZES = {1: "L", 2: "H, W", 3: "D, H, W"}


def check_floating(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a real floating-point tensor, got {tensor.dtype}; convert it first, as with {name}.float()")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The shapes of a linear map: x (…, d_in), weight (d_out, d_in), bias (d_out) or None."""
    check_floating("x", x)
    check_floating("weight", weight)
    if weight.dim() != 2:
        raise ValueError(f"weight must have the shape (d_out, d_in), got {tuple(weight.shape)}")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must have the shape (…, {weight.shape[1]}) to go with a weight of shape (d_out, d_in) = {tuple(weight.shape)}, "
            f"got {tuple(x.shape)}"
        )
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have the shape (d_out,) = ({weight.shape[0]},), got {tuple(bias.shape)}")


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, dims: int, groups: int, *, transposed: bool = False) -> None:
    """The shapes of a convolution over dims axes: x with or without N, the channels of weight by group, bias (C_out) or None."""
    check_floating("x", x)
    check_floating("weight", weight)
    check_groups(groups)
    size, kernel = _SIZES[dims], ", ".join(f"K_{axis.lower()}" for axis in _SIZES[dims].split(", "))
    channels = "C_in, C_out/groups" if transposed else "C_out, C_in/groups"
    if weight.dim() != dims + 2 or 0 in weight.shape:
        raise ValueError(f"weight must have the shape ({channels}, {kernel}), none of them 0, got {tuple(weight.shape)}")
    if x.dim() not in (dims + 1, dims + 2):
        raise ValueError(f"x must have the shape (N, C_in, {size}) or (C_in, {size}), got {tuple(x.shape)}")
    if weight.shape[0] % groups:
        first = channels.split(", ")[0]
        raise ValueError(f"{first} = {weight.shape[0]}, the first size of weight, must be divisible by groups = {groups}")
    in_channels, out_channels = weight.shape[0], weight.shape[1] * groups
    if not transposed:
        in_channels, out_channels = out_channels, in_channels
    if x.shape[-dims - 1] != in_channels:
        raise ValueError(
            f"x must have {in_channels} channels to go with a weight of shape ({channels}, {kernel}) = {tuple(weight.shape)} and "
            f"groups = {groups}, got {x.shape[-dims - 1]} in {tuple(x.shape)}"
        )
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != (out_channels,):
            raise ValueError(f"bias must have the shape (C_out,) = ({out_channels},), got {tuple(bias.shape)}")


def check_groups(groups: int) -> None:
    if not is_whole(groups):
        raise TypeError(f"groups must be a whole number, got {type(groups).__name__}")
    if groups < 1:
        raise ValueError(f"groups must be 1 or more, got {groups}")


def is_whole(value: Any) -> bool:
    if isinstance(value, int):  # first, since torch.compile takes such numbers for variables, which it cannot ask for attributes
        return not isinstance(value, bool)
    return hasattr(value, "__index__") and not isinstance(value, torch.Tensor)


def check_gain(gain: float) -> float:
    value = _number("gain", gain)
    if value <= 0.0:
        raise ValueError(f"gain must be positive, got {gain!r}; 1.0 leaves the map as the formula states it")
    return value


def check_eps(eps: float | None) -> float:
    """ε as a number; None is float32's, whatever the dtype."""
    if eps is None:
        return DEFAULT_EPS
    value = _number("eps", eps)
    if value < 0.0:
        raise ValueError(f"eps must be zero or positive, got {eps!r}; it is added to the squared norm under the root")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "; a learnable one would not get its gradient: multiply the output by it instead" if isinstance(value, torch.Tensor) else ""
        raise TypeError(f"{name} must be a number, got {type(value).__name__}{hint}")
    if not -_LARGEST <= value <= _LARGEST:  # not math.isfinite: it breaks the graph where torch.compile has made the number dynamic
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)
