# Which modules of a model can be measured, what layers each of them has, and why the rest is not.
from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from affine_divergence.diagnostics._kinds import HF_CONV1D, METHODS, MapOf, is_exactly, kind_of, linear

if TYPE_CHECKING:
    from torch import Tensor

Cut = tuple[int, int]  # rows of a packed parameter, from and to


@dataclass(frozen=True)
class Part:
    """A layer's weight or bias: a parameter of a module by its name, or some rows of one, in the orientation of nn.Linear."""

    module: nn.Module
    name: str
    cut: Cut | None = None
    transposed: bool = False

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that holds it."""
        value: nn.Parameter = getattr(self.module, self.name)
        return value

    @property
    def held(self) -> bool:
        """Whether it is there: a bias may be set to None later."""
        return isinstance(self.module._parameters.get(self.name), nn.Parameter)

    @property
    def computed(self) -> bool:
        """Whether it is made from other parameters."""
        return _is_computed(self.module, self.name)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a tensor that is like the parameter."""
        if self.cut is not None:
            whole = whole[self.cut[0] : self.cut[1]]
        return whole.mT if self.transposed else whole


@dataclass(frozen=True)
class Layer:
    """One affine map of a module: what it is called, its parameters, and the map at the input of a call."""

    name: str
    module: nn.Module
    map_of: MapOf
    weight: Part | None
    bias: Part | None
    correction: str = "none"  # that it has: its parameters' gradients, or its map, are corrected already
    known_as: type[nn.Module] = nn.Module  # the class that the map is of

    @property
    def type(self) -> str:
        """That of the module."""
        return type(self.module).__name__

    @property
    def structural(self) -> bool:
        """Whether its map is a corrected one."""
        return self.correction not in ("none", "sample", "batch")

    @property
    def parts(self) -> tuple[Part | None, Part | None]:
        """Weight and bias, where there are such."""
        weight, bias = (part if part is not None and part.held else None for part in (self.weight, self.bias))
        return weight, bias


@dataclass(frozen=True)
class Site:
    """A module that is watched: the name of its first argument, and its layers; four of nn.MultiheadAttention."""

    name: str
    module: nn.Module
    input: str
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Found:
    """What a model has."""

    sites: tuple[Site, ...]
    skipped: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)  # by name, with the reason


def find_layers(model: nn.Module, include: str | Sequence[str] | None = None) -> Found:
    """The modules that can be measured, and those with parameters that can not."""
    names = dict(model.named_modules())
    chosen = None if include is None else _chosen(model, include)
    sites: list[Site] = []
    skipped: dict[str, tuple[nn.Module, str]] = {}
    claimed: set[nn.Module] = set()
    for name, module in names.items():
        if module in claimed:
            continue
        found = _layers_of(name, module)
        if found is None and not any(True for _ in module.parameters(recurse=False)):
            continue
        if chosen is not None and module not in chosen:
            skipped[name] = module, "not in include"
        elif found is None or isinstance(found, str):
            skipped[name] = module, found or _why_not(module)
        else:
            sites.append(Site(name, module, _first_argument(module), found))
            if isinstance(module, nn.MultiheadAttention):
                claimed.add(module.out_proj)  # never called: its parameters are read
    return Found(tuple(sites), skipped)


def _chosen(model: nn.Module, include: str | Sequence[str]) -> set[nn.Module]:
    """The modules that patterns name, by any of their names."""
    patterns = [include] if isinstance(include, str) else include
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"include must be a pattern or a list of them, as 'encoder.*', got {include!r}")
    if not patterns:
        raise ValueError("include has no pattern: nothing would be measured; leave it out to measure all")
    names = list(model.named_modules(remove_duplicate=False))
    chosen = set()
    for pattern in patterns:
        fitting = {module for name, module in names if fnmatch.fnmatchcase(name, pattern)}
        if not fitting:
            known = [name for name, _ in names if name]
            there = f"the model has {', '.join(known[:8])}{', …' if len(known) > 8 else ''}" if known else 'the model itself is named ""'
            raise ValueError(f"include: no module's name fits {pattern!r}; {there}")
        chosen |= fitting
    return chosen


def _layers_of(name: str, module: nn.Module) -> tuple[Layer, ...] | str | None:
    """The layers; or why a module of a type that could be measured is not; or None."""
    if isinstance(module, nn.MultiheadAttention):
        return tuple(_projections(name, module)) if is_exactly(module, nn.MultiheadAttention) else _own_forward(module)
    if isinstance(module, torch.jit.ScriptModule):
        return None
    kind, own_forward = kind_of(module)
    if kind is None:
        return _own_forward(module) if own_forward else None
    if any(_is_computed(module, part) for part in kind.parameters):
        return PARAMETRISED
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return "its parameters are complex numbers"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "max_norm changes its weight in the forward"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides its gradient by the frequency of the tokens"
    transposed = kind is HF_CONV1D
    parts = [Part(module, part, transposed=transposed and part == "weight") for part in kind.parameters]
    held = [part if module._parameters.get(part.name) is not None else None for part in parts] + [None]
    return (Layer(name, module, kind.map_of, held[0], held[1], kind.correction, type(module)),)


PARAMETRISED = "parametrised: its weight or bias is computed from other parameters"


def _own_forward(module: nn.Module) -> str:
    replaced = any(name in vars(module) for name in METHODS)
    whose = "its forward was replaced, on the instance" if replaced else "its class has a forward of its own"
    return f"{whose}: what it does with the weight is not known"


def _is_computed(module: nn.Module, name: str) -> bool:
    # Not by asking the module for it: a spectral norm in training takes a step of its power iteration each time.
    if name in module._parameters:
        return False
    return is_parametrized(module, name) or module.__dict__.get(name, module._buffers.get(name)) is not None


def _has(module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not None or _is_computed(module, name)


def _why_not(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule, in which hooks do not see what layers do"
    if isinstance(module, nn.RNNBase):
        return "its weights are applied inside one fused call, where no hook sees them"
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)) or "Norm" in type(module).__name__:
        return "a normaliser: its parameters act on one feature each"
    if type(module).__module__.startswith("torch.nn."):
        return "not a type that is measured"
    return "holds parameters that no measured layer applies"


def _first_argument(module: nn.Module) -> str:
    return next(name for name in inspect.signature(type(module).forward).parameters if name != "self")


def _projections(name: str, module: nn.MultiheadAttention) -> Iterator[Layer]:
    start = f"{name}." if name else ""
    size = module.embed_dim
    for place, what in enumerate(("q", "k", "v")):
        cut = size * place, size * (place + 1)
        packed = module._qkv_same_embed_dim
        weight = Part(module, "in_proj_weight", cut) if packed else Part(module, f"{what}_proj_weight")
        bias = Part(module, "in_proj_bias", cut) if _has(module, "in_proj_bias") else None
        yield Layer(f"{start}{what}_proj", module, linear, weight, bias, known_as=type(module))
    bias = Part(module.out_proj, "bias") if _has(module.out_proj, "bias") else None
    yield Layer(f"{start}out_proj", module, linear, Part(module.out_proj, "weight"), bias, known_as=type(module))
