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
    assumed: bool = False  # the learning rate: it was not given
    spent: dict[Parameter, Tensor] | None = None  # changes that have taken the place of values, to save memory

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameters: Iterable[Parameter], *, assumed: bool = False, once: bool = False) -> Before:
        """Copies of the values; assumed: nobody gave a learning rate.

        With once it is asked for changes only while the parameters are as the step left them, and dropped then.
        """
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
        return Before({p: p.detach().clone() for p in lr}, lr, frozenset(maximized), assumed, {} if once else None)

    def change(self, parameter: Parameter) -> Tensor:
        """Of a parameter, against what it is now, in float32 or wider."""
        if self.spent is None:
            return _difference(parameter, self.values[parameter])
        if parameter not in self.spent:
            old = self.values[parameter]
            in_place = old.dtype == wide_dtype(old.dtype) and old.layout == torch.strided
            self.spent[parameter] = torch.sub(parameter.detach(), old, out=old) if in_place else _difference(parameter, old)
        return self.spent[parameter]

    def old(self, parameter: Parameter) -> Tensor:
        """What it was."""
        if self.spent is None or parameter not in self.spent:
            return self.values[parameter]
        return parameter.detach() - self.spent[parameter]


def _difference(parameter: Parameter, old: Tensor) -> Tensor:
    dtype = wide_dtype(old.dtype)
    return parameter.detach().to(dtype) - old.to(dtype)
