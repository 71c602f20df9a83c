# Which captured calls have no part in the step that follows: those whose gradient was cleared after it had arrived.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._faults import reason_of
from affine_divergence.diagnostics._told import rows_of_call
from affine_divergence.diagnostics._transfer import transferred

if TYPE_CHECKING:
    from torch import Tensor, nn

    from affine_divergence.diagnostics._call import Call
    from affine_divergence.diagnostics._layers import Layer, Part


class Gone(NamedTuple):
    """What .grad lacks of captured calls."""

    calls: dict[Layer, list[Call]]  # of layers whose stepped parameters have nothing of them
    partly: set[Layer]  # those of whose stepped parameters one has it and another has not


def gone(calls: Iterable[Call], stepped: Container[nn.Parameter]) -> Gone:
    """Of these calls, asked of the parameters that a step changes, one by one."""
    by_layer: dict[Layer, list[Call]] = defaultdict(list)
    for call in calls:
        by_layer[call.layer].append(call)
    parts = {layer: asked(layer, stepped) for layer in by_layer}
    there = _there([part.parameter for of_layer in parts.values() for part in of_layer])
    made = _made({layer: of_layer for layer, of_layer in by_layer.items() if any(_is_zeros(part, there) for part in parts[layer])}, parts)
    found = Gone({}, set())
    for layer, of_layer in by_layer.items():
        lacking = [part for part in parts[layer] if part.parameter.grad is None or (_is_zeros(part, there) and (layer, part) in made)]
        if not lacking:
            continue
        held = any(part.parameter in there for part in parts[layer])
        if held or any(_arrived_as_zeros(part.parameter, of_layer) for part in lacking):
            found.partly.add(layer)
        else:
            found.calls[layer] = of_layer
    return found


def asked(layer: Layer, stepped: Container[nn.Parameter]) -> list[Part]:
    """Those of weight and bias that an optimiser steps; where it has neither, both."""
    parts = [part for part in layer.parts if part is not None]
    return [part for part in parts if part.parameter in stepped] or parts


def stepped_by(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """The parameters that an optimiser has now and that learn."""
    return {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def is_there(gradient: Tensor | None) -> bool:
    """Whether it is one that is not zeros, as zero_grad(set_to_none=False) leaves."""
    if gradient is None:
        return False
    gradient = _numbers(gradient)
    return bool(gradient[:1].any()) or bool(gradient.any())


def _there(parameters: Iterable[nn.Parameter]) -> set[nn.Parameter]:
    """Those whose gradient is not zeros, in two transfers from a device at most."""
    # Mostly a few numbers tell: to ask all of them takes ten times as long as their norm.
    left = {p: _numbers(p.grad) for p in parameters if p.grad is not None}
    few = _any({p: gradient[:1] for p, gradient in left.items()})
    return few | _any({p: gradient for p, gradient in left.items() if p not in few})


def _any(gradients: dict[nn.Parameter, Tensor]) -> set[nn.Parameter]:
    answers = transferred([[gradient.any() for gradient in gradients.values()]])[0]
    return {p for p, answer in zip(gradients, answers, strict=True) if answer}


def _numbers(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient


def _is_zeros(part: Part, there: Container[nn.Parameter]) -> bool:
    return part.parameter.grad is not None and part.parameter not in there


def _arrived_as_zeros(parameter: nn.Parameter, calls: Sequence[Call]) -> bool:
    """Whether zeros are what a hook of the parameter made of its gradient, and nobody has written to them since."""
    if parameter.grad is None or not parameter._backward_hooks:
        return False
    return parameter.grad._version < len({call.passed for call in calls})  # each pass but the first adds in place


def _made(calls: dict[Layer, list[Call]], parts: dict[Layer, list[Part]]) -> set[tuple[Layer, Part]]:
    """The parts whose gradient these calls add up to is not zeros by itself, as it is behind a ReLU that is off."""
    totals: dict[tuple[Layer, Part], Tensor] = {}
    for layer, of_layer in calls.items():
        try:
            totals |= {(layer, part): total.any() for part, total in _sums(layer, parts[layer], of_layer).items()}
        except Exception as error:  # the same that is its reason when it is told
            reason_of(error)
    return {key for key, answer in zip(totals, transferred([[*totals.values()]])[0], strict=True) if answer}


@torch.no_grad()
def _sums(layer: Layer, parts: Sequence[Part], calls: Sequence[Call]) -> dict[Part, Tensor]:
    """What the calls add up to, without what such sums round to."""
    assert layer.weight is not None
    sums: dict[Part, Tensor] = {}
    size: Tensor | float = 0.0
    needed = tuple(part is not None and part in parts and part.parameter.requires_grad for part in layer.parts)
    for call in calls:
        rows = rows_of_call(call)
        weight = layer.weight.of(layer.weight.parameter.detach()).to(rows.g.dtype)
        for part, gradient in zip(layer.parts, rows.gradients(weight, (needed[0], needed[1])), strict=True):
            if part is not None and gradient is not None:
                sums[part] = sums[part] + gradient if part in sums else gradient
        of_inputs = rows.x.norm() if rows.x.is_floating_point() else 1.0
        size = size + rows.g.norm() * (of_inputs + math.sqrt(len(rows.g)))
    # What vanishes in the dtype in which it arrived was 0.
    narrow = min((call.g.dtype for call in calls if call.g is not None), key=lambda dtype: torch.finfo(dtype).bits)
    totals = {part: total.to(narrow) for part, total in sums.items()}
    return {part: (total.abs() > torch.finfo(narrow).eps * size) | ~total.isfinite() for part, total in totals.items()}
