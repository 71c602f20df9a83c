# What a step of an optimiser changes: parameters before and after, and how their groups were set.
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from affine_divergence.functional._rows import wide_dtype

if TYPE_CHECKING:
    from torch import Tensor

Parameter = nn.Parameter


@dataclass(frozen=True)
class Before:
    """Parameters as they were before a step, those that the optimiser has and that learn."""

    values: dict[Parameter, Tensor]
    lr: dict[Parameter, float]  # NaN where a group has none
    maximized: frozenset[Parameter]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameters: Iterable[Parameter]) -> Before:
        """Copies of the values."""
        wanted = set(parameters)
        lr: dict[Parameter, float] = {}
        maximized = set()
        for group in optimizer.param_groups:
            rate = float(group.get("lr", math.nan))
            for parameter in group["params"]:
                if parameter in wanted and parameter.requires_grad:
                    lr[parameter] = rate
                    if group.get("maximize", False):
                        maximized.add(parameter)
        return Before({p: p.detach().clone() for p in lr}, lr, frozenset(maximized))

    def changed(self) -> dict[Parameter, Tensor]:
        """The change of all of them, in float32 or wider."""
        return {p: self.change(p) for p in self.values}

    def change(self, parameter: Parameter) -> Tensor:
        """Of one of them, against what it is now."""
        now, old = parameter.detach(), self.values[parameter]
        dtype = wide_dtype(now.dtype)
        return now.to(dtype) - old.to(dtype)
