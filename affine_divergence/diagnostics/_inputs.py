# A batch as a model takes it: one tensor, positional arguments, or keyword arguments.
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
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
    return mapped(batch, _own)


def mapped(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], made: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """The batch with others for its tensors, each once; containers and dataclasses are of the class that they were.

    Whatever else it holds stays what it is. made: by the number of a part the part, for which it must live, and what is made of it.
    """
    made = {} if made is None else made
    if id(batch) not in made:
        made[id(batch)] = batch, _made(batch, of_tensor, made)
    return made[id(batch)][1]


def _made(batch: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor], made: dict[int, tuple[Any, Any]]) -> Any:
    def part_of(part: Any) -> Any:
        return mapped(part, of_tensor, made)

    if isinstance(batch, torch.Tensor):
        return of_tensor(batch)
    if isinstance(batch, tuple):
        parts = [part_of(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts) if type(batch) is tuple else batch
    if isinstance(batch, (list, MutableMapping)):
        container = copy.copy(batch)
        for key in range(len(container)) if isinstance(container, list) else list(container):
            container[key] = part_of(container[key])
        return container
    if isinstance(batch, Mapping):
        return {name: part_of(part) for name, part in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, part_of(getattr(batch, field.name)))  # also of a frozen one
        return twin
    return batch


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone().requires_grad_(tensor.requires_grad)
