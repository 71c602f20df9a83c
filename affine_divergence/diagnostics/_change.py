# What a step of an optimiser changes: parameters before and after, and how their groups were set.
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from affine_divergence.diagnostics._layers import Part
from affine_divergence.functional._rows import wide_dtype
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

Parameter = nn.Parameter
_PART = 2**17  # numbers
_SMALL, _LARGE = 1e-12, 1e18


@dataclass(frozen=True)
class Before:
    """Parameters as they were before a step, those that the optimiser has and that learn."""

    values: dict[Parameter, Tensor]
    lr: dict[Parameter, float]  # NaN where a group has none
    maximized: frozenset[Parameter]
    assumed: bool  # the learning rate: it was not given
    own: bool  # the values are copies of its own, whose place changes may take
    changes: dict[Parameter, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[Parameter],
        values: Mapping[Parameter, Tensor] | None = None,
        *,
        assumed: bool = False,
    ) -> Before:
        """By the values given; else by copies. To be asked for changes while parameters are as the step left them.

        assumed: nobody gave a learning rate.
        """
        wanted = set(parameters)
        lr: dict[Parameter, float] = {}
        maximized = set()
        for group in optimizer.param_groups:
            rate = rate_of(group)
            for parameter in group["params"]:
                if parameter in wanted and parameter.requires_grad:
                    lr[parameter] = rate
                    if group.get("maximize", False):
                        maximized.add(parameter)
        if values is None:
            return Before({p: p.detach().clone() for p in lr}, lr, frozenset(maximized), assumed, own=True)
        return Before({p: values[p] for p in lr}, lr, frozenset(maximized), assumed, own=False)

    def change(self, parameter: Parameter) -> Tensor:
        """Of a parameter, against what it is now, in float32 or wider."""
        if parameter not in self.changes:
            now, old = parameter.detach(), self.values[parameter]
            dtype = wide_dtype(old.dtype)
            in_place = self.own and old.dtype == dtype and old.layout == torch.strided
            self.changes[parameter] = torch.sub(now, old, out=old) if in_place else now.to(dtype) - old.to(dtype)
        return self.changes[parameter]

    def length(self, part: Part) -> Tensor:
        """The norm of what a part of a parameter was, in float64."""
        if not self.own or part.parameter not in self.changes:
            return norm(part.of(self.values[part.parameter]))
        now, change = part.of(part.parameter.detach()), part.of(self.changes[part.parameter])
        size = max(1, _PART // max(1, now[:1].numel()))
        parts = [norm(n - c) for n, c in zip(now.split(size), change.split(size), strict=True)]
        joined: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return joined


def rate_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a group of an optimiser, NaN where it has none: no `lr`, or one that the optimiser makes at each step."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def norm(tensor: Tensor) -> Tensor:
    """In float64, of numbers of any size."""
    if tensor.dtype == torch.float32 and tensor.device.type == "cpu":
        quick: Tensor = torch.linalg.vector_norm(tensor)
        if _SMALL < float(quick) < _LARGE:  # else squares may have vanished
            return quick.double()
    dtype = solve_dtype(tensor.device)
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in tensor.reshape(-1).split(_PART)]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return joined
