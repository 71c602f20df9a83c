# What torch.autocast asks for: tensors in the dtype of the products, and a region without it.
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def promoted(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight and bias in the dtype that torch's own operation would return, or in the promoted one where it refuses mixed dtypes."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    dtype = dtype if bias is None else torch.promote_types(dtype, bias.dtype)
    autocast = autocast_enabled(x.device.type)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    # Under autocast the norm is taken before x is rounded: a float32 value of 1e5 would be inf in float16.
    return x if autocast else x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def autocast_enabled(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if autocast_enabled(device) else contextlib.nullcontext()
