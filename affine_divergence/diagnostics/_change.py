# What a step of an optimiser changes: parameters before and after, and how their groups were set.
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from affine_divergence.diagnostics._layers import Part
from affine_divergence.functional._rows import wide_dtype
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

Parameter = nn.Parameter
_PART = 2**17  # numbers


@dataclass(frozen=True)
class Before:
    """Parameters as they were before a step, those that the optimiser has and that learn."""

    values: dict[Parameter, Tensor]
    lr: dict[Parameter, float]  # NaN where a group has none
    maximized: frozenset[Parameter]
    assumed: bool = False  # the learning rate: it was not given
    spent: dict[Parameter, Tensor] | None = None  # changes that have taken the place of values, to save memory

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[Parameter],
        values: Mapping[Parameter, Tensor] | None = None,
        *,
        assumed: bool = False,
    ) -> Before:
        """By the values given; else by copies, which changes take the place of: to be asked while parameters are as the step left them.

        assumed: nobody gave a learning rate.
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
        if values is None:
            return Before({p: p.detach().clone() for p in lr}, lr, frozenset(maximized), assumed, {})
        return Before({p: values[p] for p in lr}, lr, frozenset(maximized), assumed)

    def change(self, parameter: Parameter) -> Tensor:
        """Of a parameter, against what it is now, in float32 or wider."""
        if self.spent is None:
            return _difference(parameter, self.values[parameter])
        if parameter not in self.spent:
            old = self.values[parameter]
            in_place = old.dtype == wide_dtype(old.dtype) and old.layout == torch.strided
            self.spent[parameter] = torch.sub(parameter.detach(), old, out=old) if in_place else _difference(parameter, old)
        return self.spent[parameter]

    def length(self, part: Part) -> Tensor:
        """The norm of what a part of a parameter was, in float64."""
        now, change = part.of(part.parameter.detach()), part.of(self.change(part.parameter))
        old = part.of(self.values[part.parameter]) if self.spent is None else None
        square = torch.zeros((), dtype=solve_dtype(now.device), device=now.device)
        size = max(1, _PART // max(1, now[:1].numel()))
        for start in range(0, len(now), size):  # a few rows at a time, where what it was must be made again
            rows = slice(start, start + size)
            was = now[rows] - change[rows] if old is None else old[rows]
            square += torch.linalg.vector_norm(was, dtype=square.dtype).square()
        return square.sqrt()


def _difference(parameter: Parameter, old: Tensor) -> Tensor:
    dtype = wide_dtype(old.dtype)
    return parameter.detach().to(dtype) - old.to(dtype)
