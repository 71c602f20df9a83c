# The coverage: which layers were measured, and why the others were not.
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._records import Coverage

if TYPE_CHECKING:
    from torch import nn

    from affine_divergence.diagnostics._layers import Found, Layer


def coverage(
    model: nn.Module,
    found: Found,
    forwards: Mapping[Layer, int],
    fired: Mapping[Layer, int],
    measured: Set[str],
    failed: Mapping[str, str],
    *,
    compiled: bool = False,
) -> list[Coverage]:
    """In the order of the model.

    By name: those that have rows, and why calls that arrived could not be measured. compiled: the whole model is.
    """
    modules = dict(model.named_modules())
    compiled_modules = set(model.modules()) if compiled else _compiled(model)
    lines: dict[str, list[Coverage]] = {}
    for name, (module, reason) in found.skipped.items():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        lines[name] = [_skipped(name, type(module).__name__, reason, own)]
    for site in found.sites:
        lines[site.name] = []
        for layer in site.layers:
            calls, arrived = forwards.get(layer, 0), fired.get(layer, 0)
            reason = failed.get(layer.name, "")
            if not reason and not arrived:
                replaced = modules.get(site.name) is not site.module
                reason = _REPLACED if replaced else _why_silent(layer, calls, site.module in compiled_modules)
            status: Any = "measured" if layer.name in measured else "skipped"
            own = sum(part.of(part.parameter).numel() for part in layer.parts if part is not None)
            one = Coverage(module=layer.name, type=layer.type, status=status, reason=reason, parameters=own, calls=calls, fired=arrived)
            lines[site.name].append(one)
    return [line for name in (*modules, *(lines.keys() - modules.keys())) for line in lines.get(name, ())]


def fired_of(calls: list[Any]) -> Counter[Layer]:
    """How many calls of each layer got their gradient."""
    return Counter(call.layer for call in calls)


_REPLACED = "another module has taken its place: begin anew to see that one"


def _why_silent(layer: Layer, calls: int, compiled: bool) -> str:
    parameters = [part.parameter for part in layer.parts if part is not None]
    if not any(p.requires_grad for p in parameters):
        return "frozen: neither weight nor bias learns"
    if calls:
        return "called, but no gradient arrived at its output"
    if not any(p.grad is not None for p in parameters):
        return "compiled, so that hooks did not fire, or not called" if compiled else "not called"
    if compiled:
        return "compiled, so that hooks did not fire"
    return "its parameters have a gradient and its hooks did not fire: used by a function without calling it, or inside compiled code"


def _compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that are compiled, or in one that is."""
    roots = [m for m in model.modules() if type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None]
    return {inner for root in roots for inner in root.modules()}


def _skipped(name: str, type_: str, reason: str, parameters: int) -> Coverage:
    return Coverage(module=name, type=type_, status="skipped", reason=reason, parameters=parameters, calls=0, fired=0)
