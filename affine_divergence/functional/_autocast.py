# What torch.autocast asks for: the dtype of the products, and a region without it.
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def common_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype that torch's own operation would return, or the promoted one where it refuses mixed dtypes."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    dtype = dtype if bias is None else torch.promote_types(dtype, bias.dtype)
    if autocast_enabled(x.device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def autocast_enabled(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if autocast_enabled(device) else contextlib.nullcontext()
