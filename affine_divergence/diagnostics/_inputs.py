# A batch as a model takes it: one tensor, positional arguments, or keyword arguments.
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def called_with(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def copied(batch: Any) -> Any:
    """The batch with tensors of its own, out of any graph; a parameter that comes with it stays what it is."""
    if isinstance(batch, torch.nn.Parameter):
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return {name: copied(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(copied, batch))
    return type(batch)(map(copied, batch)) if type(batch) in (tuple, list) else batch
