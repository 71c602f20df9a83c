# Which captured calls have no part in the step that follows: those whose gradient was cleared after it had arrived.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._faults import reason_of
from affine_divergence.diagnostics._told import rows_of_call

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.diagnostics._call import Call
    from affine_divergence.diagnostics._layers import Layer


def cleared(calls: Iterable[Call]) -> list[Call]:
    """The calls of layers whose parameters no longer have what these calls added to .grad."""
    by_layer: dict[Layer, list[Call]] = defaultdict(list)
    for call in calls:
        by_layer[call.layer].append(call)
    return [call for layer, of_layer in by_layer.items() if _is_cleared(layer, of_layer) for call in of_layer]


def is_there(gradient: Tensor | None) -> bool:
    """Whether it is one that is not zeros, as zero_grad(set_to_none=False) leaves."""
    # Mostly a few numbers tell: to ask all of them takes ten times as long as their norm.
    return gradient is not None and (gradient.is_sparse or bool(gradient[:1].any()) or bool(gradient.any()))


def _is_cleared(layer: Layer, calls: list[Call]) -> bool:
    gradients = [part.parameter.grad for part in layer.parts if part is not None]
    if not gradients or any(map(is_there, gradients)):
        return False
    # Zeros may be what the rows add up to, as behind a ReLU that is off.
    return all(gradient is None for gradient in gradients) or _add_up_to_something(layer, calls)


def _add_up_to_something(layer: Layer, calls: list[Call]) -> bool:
    try:
        return any(bool(total.any()) for total in _sums(layer, calls))
    except Exception as error:  # the same that is its reason when it is told
        reason_of(error)
        return False


@torch.no_grad()
def _sums(layer: Layer, calls: list[Call]) -> list[Tensor]:
    sums: list[Tensor | None] = [None, None]
    for call in calls:
        assert call.g is not None
        assert layer.weight is not None
        rows = rows_of_call(call)
        weight = layer.weight.of(layer.weight.parameter.detach()).to(rows.g.dtype)
        learns = tuple(part is not None and part.parameter.requires_grad for part in layer.parts)
        for place, gradient in enumerate(rows.gradients(weight, (learns[0], learns[1]))):
            if gradient is not None:
                before = sums[place]
                sums[place] = gradient if before is None else before + gradient
    narrow = min((call.g.dtype for call in calls if call.g is not None), key=lambda dtype: torch.finfo(dtype).bits)
    return [total.to(narrow) for total in sums if total is not None]  # what vanishes in the dtype in which it arrived was 0
