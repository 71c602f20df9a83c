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
