# From captured calls to rows: batched, in one dtype, with the sign and scale that the gradient had for the optimiser.
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._faults import NotMeasuredError, reason_of
from affine_divergence.diagnostics._layers import PARAMETRISED, Layer, Part
from affine_divergence.diagnostics._maps import ConvMap, EmbeddingMap, LinearMap, ScaledMap
from affine_divergence.diagnostics._measures import Rows
from affine_divergence.functional._rows import wide_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.diagnostics._call import Call


@dataclass(frozen=True)
class Told:
    """One call, ready to be measured: its number, its rows, and which of weight and bias the step changes."""

    layer: Layer
    number: int
    rows: Rows
    needed: tuple[bool, bool]
    weight: Tensor  # for its shape: of now
    eps: float  # of the dtype in which the gradient arrived

    def parts(self, of: Callable[[Parameter], Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What there is of both parameters, in the dtype of the rows; None of one that does not change."""
        weight, bias = (
            part.of(of(part.parameter)).to(self.rows.g.dtype) if part is not None and needed else None
            for part, needed in zip(self.layer.parts, self.needed, strict=True)
        )
        return weight, bias

    @property
    def learns(self) -> tuple[bool, bool]:
        """Which of weight and bias learn, by whatever optimiser: the sample correction divides by the G_ii of these."""
        weight, bias = (part is not None and part.parameter.requires_grad for part in self.layer.parts)
        return weight, bias

    def changing(self) -> list[Part]:
        """Those of weight and bias that the step changes."""
        return _changing(self.layer.parts, self.needed)

    def leading(self, before: Before) -> Part:
        """The weight, where it changes; else the bias. By its learning rate multipliers are counted."""
        parts = self.changing()
        return next((part for part in parts if before.lr[part.parameter] != 0.0), parts[0])


def families(calls: Sequence[Told]) -> list[list[Told]]:
    """The calls whose layers share a parameter, together: nearly always those of one layer."""
    found: list[tuple[set[Parameter], list[Told]]] = []
    for one in calls:
        parameters = {part.parameter for part in one.layer.parts if part is not None}
        joined = [family for family in found if family[0] & parameters]
        found = [family for family in found if not family[0] & parameters]
        found.append((parameters.union(*(family[0] for family in joined)), [*(c for family in joined for c in family[1]), one]))
    return [family for _, family in found]


def told(calls: Iterable[Call], before: Before, loss_scale: float = 1.0) -> tuple[list[Told], dict[str, str]]:
    """The calls with their rows; and by name the layers that cannot be told, with the reason."""
    ready: list[Told] = []
    failed: dict[str, str] = {}
    numbers: dict[Layer, int] = defaultdict(int)
    for call in calls:
        number = numbers[call.layer]
        numbers[call.layer] += 1
        try:
            ready.append(_told(call, number, before, loss_scale))
        except Exception as error:
            failed[call.layer.name] = reason_of(error)
    return ready, failed


def _told(call: Call, number: int, before: Before, loss_scale: float) -> Told:
    layer, (weight, bias) = call.layer, call.layer.parts
    if weight is None or type(layer.module) is not layer.known_as:
        raise NotMeasuredError("its class or its parameters were changed after this began to listen: begin anew")
    if any(part is not None and part.computed for part in (layer.weight, layer.bias)):
        raise NotMeasuredError(PARAMETRISED)
    needed = _changes(weight, before), _changes(bias, before)
    if not any(needed):
        raise NotMeasuredError("frozen: the optimizer has neither its weight nor its bias")
    changed = call.changed()
    if changed is not None and (changed != "its input" or needed[0] or layer.structural):
        raise NotMeasuredError(f"{changed} was changed in place before the step: measure without that operation")
    signs = {part.parameter in before.maximized for part in _changing((weight, bias), needed)}
    if len(signs) > 1:
        raise NotMeasuredError("its weight is to maximise the loss and its bias to minimise it, or the reverse")
    rows = rows_of_call(call, (-1.0 if True in signs else 1.0) / loss_scale)
    assert call.g is not None
    eps = torch.finfo(call.g.dtype).eps
    return Told(layer, number, rows, needed, weight.of(weight.parameter.detach()).to(rows.g.dtype), eps)


def _changing(parts: Sequence[Part | None], needed: Sequence[bool]) -> list[Part]:
    return [part for part, moves in zip(parts, needed, strict=True) if part is not None and moves]


def _changes(part: Part | None, before: Before) -> bool:
    return part is not None and part.parameter in before.values


def rows_of_call(call: Call, factor: float = 1.0) -> Rows:
    """The rows of a call, its gradients times a factor."""
    layer, x, g = call.layer, call.x, call.g
    assert g is not None
    assert layer.weight is not None
    for what, tensor in (("its input", x), ("the gradient at its output", g)):
        if strange := _strange(tensor):
            raise NotMeasuredError(f"{what} is a {strange} tensor: not measured")
    device = layer.weight.parameter.device  # of a module that moves its inputs itself
    x, g = x.to(device), g.to(device)
    map_ = layer.map_of(layer.module, x, call.options)
    inner = map_.inner if isinstance(map_, ScaledMap) else map_
    dtype = wide_dtype(torch.promote_types(g.dtype, layer.weight.parameter.dtype))
    if isinstance(inner, EmbeddingMap):
        axes = tuple(x.shape) or (1,)
        x, g = x.reshape(-1), g.reshape(-1, g.shape[-1])
    else:
        dtype = torch.promote_types(dtype, x.dtype)
        x = x.to(dtype)
        if isinstance(inner, LinearMap):
            axes = tuple(g.shape[:-1]) or (1,)
            x, g = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, g))
        else:
            assert isinstance(inner, ConvMap)
            if g.dim() == len(inner.geometry.kernel_size) + 1:
                x, g = x.unsqueeze(0), g.unsqueeze(0)
            axes = (g.shape[0], inner.geometry.groups, *g.shape[2:])
    if call.layout is not None:
        axes = call.layout.axes(len(g))
    g = g.to(dtype)
    return Rows(map_, x, g if factor == 1.0 else factor * g, axes, swapped=call.layout is not None and call.layout.swapped)


def _strange(tensor: Tensor) -> str:
    """How a tensor lies in memory, where rows cannot be taken of it."""
    if tensor.is_nested:
        return "nested"
    return "" if tensor.layout == torch.strided else "sparse" if "sparse" in str(tensor.layout) else str(tensor.layout)
