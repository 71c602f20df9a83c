# The coverage: which layers were measured, and why the others were not.
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from affine_divergence.diagnostics._cleared import is_there
from affine_divergence.diagnostics._layers import PARAMETRISED
from affine_divergence.diagnostics._records import Coverage
from affine_divergence.diagnostics._unexplained import WITHOUT_GRADIENTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from affine_divergence.diagnostics._capture import Capture
    from affine_divergence.diagnostics._layers import Cut, Layer, Part, Site

    Held = tuple[nn.Parameter, Cut | None]  # a parameter, or some rows of a packed one


class _Line(NamedTuple):
    said: Coverage
    holds: Sequence[Held]


def coverage(
    model: nn.Module,
    capture: Capture,
    measured: Set[str],
    failed: Mapping[str, str],
    had: Mapping[nn.Parameter, Tensor],
    *,
    compiled: bool = False,
) -> list[Coverage]:
    """In the order of the model.

    By name: those that have rows, and why calls that arrived could not be measured. had: gradients at the step that are no longer in
    the parameters. compiled: the whole model is.
    """
    modules = dict(model.named_modules())
    present = set(modules.values())
    compiled_modules = set(model.modules()) if compiled else _compiled(model)
    fired = Counter(call.layer for call in capture.calls)
    elsewhere = _by_part([layer for site in capture.found.sites for layer in site.layers if fired[layer]], measured)
    lines = _new(modules, capture)
    for name, (module, reason) in capture.found.skipped.items():
        if module in present:
            lines[name].append(_skipped(name, type(module).__name__, reason, _own(module)))
        elif not lines[name]:
            lines[name].append(_skipped(name, type(module).__name__, _REPLACED if name in modules else _GONE, ()))
    for site in capture.found.sites:
        here = site.module in present
        if not here and lines[site.name] and not any(fired[layer] for layer in site.layers):
            continue
        for layer in site.layers:
            calls, arrived = capture.forwards[layer], fired[layer]
            reason = failed.get(layer.name, "")
            if not reason and not arrived:
                silent = _why_silent(layer, capture, elsewhere, had, site.module in compiled_modules)
                reason = silent if here else _REPLACED if site.name in modules else _GONE
            one = Coverage(
                module=layer.name,
                type=layer.type,
                status="measured" if layer.name in measured else "skipped",
                reason=reason,
                parameters=0,
                calls=calls,
                fired=arrived,
            )
            holds = [_held(part) for part in layer.parts if part is not None] if here else ()
            lines[site.name].append(_Line(one, holds))
        if here:
            lines[site.name] += _of_no_layer(site)
    return _counted([line for name in (*modules, *(lines.keys() - modules.keys())) for line in lines.get(name, ())])


def _new(modules: Mapping[str, nn.Module], capture: Capture) -> dict[str, list[_Line]]:
    """By name, what has parameters and was not in the model, or had none, when the layers were found."""
    sites, skipped = capture.found.sites, capture.found.skipped
    known = {module for module, _ in skipped.values()} | {site.module for site in sites}
    known |= {part.module for site in sites for layer in site.layers for part in (layer.weight, layer.bias) if part is not None}
    names = skipped.keys() | {site.name for site in sites} | {layer.name for site in sites for layer in site.layers}
    lines: dict[str, list[_Line]] = defaultdict(list)
    for name, module in modules.items():
        if module not in known and (own := _own(module)):
            lines[name].append(_skipped(name, type(module).__name__, _REPLACED if name in names else _ADDED, own))
    return lines


def _own(module: nn.Module) -> list[Held]:
    return [(p, None) for p in module.parameters(recurse=False)]


def _counted(lines: Sequence[_Line]) -> list[Coverage]:
    """With the numbers in the parameters, of which each counts once: where it is measured, if it is."""
    counts: dict[Held, int] = {}
    for place in sorted(range(len(lines)), key=lambda place: lines[place].said.status != "measured"):
        for held in lines[place].holds:
            counts.setdefault(held, place)
    return [
        replace(said, parameters=_size(holds), shared=_size(held for held in holds if counts[held] != place))
        for place, (said, holds) in enumerate(lines)
    ]


def _size(of: Iterable[Held]) -> int:
    return sum((parameter if cut is None else parameter[cut[0] : cut[1]]).numel() for parameter, cut in of)


def _held(part: Part) -> Held:
    return part.parameter, part.cut


class _Owner(NamedTuple):
    name: str
    measured: bool


def _by_part(fired: Iterable[Layer], measured: Set[str]) -> dict[Held, _Owner]:
    """What the layers that got a gradient hold: of tied ones the first that is measured, if one is."""
    owners = [(_Owner(layer.name or "the model itself", layer.name in measured), layer.parts) for layer in fired]
    found: dict[Held, _Owner] = {}
    for owner, parts in sorted(owners, key=lambda owned: not owned[0].measured):
        for part in parts:
            if part is not None:
                found.setdefault(_held(part), owner)
    return found


_REPLACED = "another module has taken its place: begin anew to see that one"
_ADDED = "added after this began to listen: begin anew to see it"
_GONE = "no longer in the model"


def _why_silent(
    layer: Layer, capture: Capture, elsewhere: Mapping[Held, _Owner], had: Mapping[nn.Parameter, Tensor], compiled: bool
) -> str:
    if layer in capture.faults:
        return capture.faults[layer]
    if any(part is not None and part.computed for part in (layer.weight, layer.bias)):
        return PARAMETRISED
    parts = {name: part for name, part in zip(("weight", "bias"), layer.parts, strict=True) if part is not None}
    if not any(part.parameter.requires_grad for part in parts.values()):
        return "frozen: neither weight nor bias learns"
    if layer in capture.aside:
        return capture.aside[layer]
    if capture.forwards[layer]:
        return "called, but no gradient arrived at its output"
    unheard = capture.unheard.get(layer.module, "")
    owners = {name: elsewhere[_held(part)] for name, part in parts.items() if _held(part) in elsewhere}
    unowned = [part.parameter for name, part in parts.items() if name not in owners]
    if any(is_there(had.get(p, p.grad)) for p in unowned):
        if unheard:
            return unheard + (_USED_TOO if unheard == WITHOUT_GRADIENTS else "")
        return "compiled, so that hooks did not fire" if compiled else _BY_A_FUNCTION
    why = unheard or ("compiled, so that hooks did not fire, or not called" if compiled else "not called")
    return f"{why}; {_tied(owners)}" if owners else why


_USED_TOO = "; the gradient of its parameters comes from another use of them"
_BY_A_FUNCTION = "its parameters have a gradient and its hooks did not fire: used by a function without calling it, or inside compiled code"


def _tied(owners: Mapping[str, _Owner]) -> str:
    """Where the weight or the bias that another layer has too got its gradient."""
    by_owner: dict[_Owner, list[str]] = {}
    for name, owner in owners.items():
        by_owner.setdefault(owner, []).append(name)
    return "; ".join(
        f"{owner.name} has the same {' and '.join(names)}, and {'is measured' if owner.measured else 'was called'}"
        for owner, names in by_owner.items()
    )


def _compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that are compiled, or in one that is."""
    roots = [m for m in model.modules() if type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None]
    return {inner for root in roots for inner in root.modules()}


def _of_no_layer(site: Site) -> list[_Line]:
    """The parameters of a module that none of its layers has, as bias_k and bias_v of nn.MultiheadAttention."""
    known = {part.parameter for layer in site.layers for part in layer.parts if part is not None}
    owners = {site.module} | {part.module for layer in site.layers for part in (layer.weight, layer.bias) if part is not None}
    named = [
        own
        for name, module in site.module.named_modules(prefix=site.name)
        if module in owners
        for own in module.named_parameters(prefix=name, recurse=False)
    ]
    return [_skipped(name, "Parameter", "a parameter that no measured layer applies", [(p, None)]) for name, p in named if p not in known]


def _skipped(name: str, type_: str, reason: str, holds: Sequence[Held]) -> _Line:
    return _Line(Coverage(module=name, type=type_, status="skipped", reason=reason, parameters=0, calls=0, fired=0), holds)
