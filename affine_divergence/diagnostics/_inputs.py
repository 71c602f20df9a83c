# A batch as a model takes it: one tensor, positional arguments, or keyword arguments.
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch


def called_with(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def copied(batch: Any, copies: dict[int, Any] | None = None) -> Any:
    """The batch with tensors of its own, out of any graph, each once; containers and dataclasses are of the class that they were.

    A parameter that comes with it stays what it is, and so does whatever else it holds.
    """
    copies = {} if copies is None else copies
    if id(batch) not in copies:
        copies[id(batch)] = _copy(batch, copies)
    return copies[id(batch)]


def _copy(batch: Any, copies: dict[int, Any]) -> Any:
    if isinstance(batch, torch.nn.Parameter):
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, tuple):
        parts = [copied(part, copies) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts) if type(batch) is tuple else batch
    if isinstance(batch, (list, MutableMapping)):
        made = copy.copy(batch)
        for key in range(len(made)) if isinstance(made, list) else list(made):
            made[key] = copied(made[key], copies)
        return made
    if isinstance(batch, Mapping):
        return {name: copied(part, copies) for name, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, copied(getattr(batch, field.name), copies))  # also of a frozen one
        return twin
    return batch
