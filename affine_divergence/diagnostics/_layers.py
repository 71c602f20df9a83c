# Which modules of a model can be measured, by one table, what affine maps each of them is, and why the rest is not.
from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from affine_divergence import nn as corrected
from affine_divergence.diagnostics._maps import AffineMap, ConvMap, EmbeddingMap, LinearMap, ScaledMap, with_output_padding
from affine_divergence.functional._arguments import check_eps
from affine_divergence.functional._geometry import conv_geometry, conv_transpose_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.nn._patch_norm import PatchNorm

if TYPE_CHECKING:
    from torch import Tensor

MapOf = Callable[[Any, "Tensor", Sequence[Any]], AffineMap]
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
        return isinstance(getattr(self.module, self.name, None), nn.Parameter)

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


@dataclass(frozen=True)
class _Kind:
    map_of: MapOf
    parameters: tuple[str, ...] = ("weight", "bias")
    correction: str = "none"


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
        return tuple(_projections(name, module)) if _is_exactly(module, nn.MultiheadAttention) else _OWN_FORWARD
    if isinstance(module, torch.jit.ScriptModule):
        return None
    kind, own_forward = _kind(module)
    if kind is None:
        return _OWN_FORWARD if own_forward else None
    if any(part not in module._parameters and getattr(module, part) is not None for part in kind.parameters):
        return "parametrised: its weight or bias is computed from other parameters"
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return "its parameters are complex numbers"
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "max_norm changes its weight in the forward"
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq divides its gradient by the frequency of the tokens"
    transposed = kind is _HF_CONV1D
    parts = [Part(module, part, transposed=transposed and part == "weight") for part in kind.parameters]
    held = [part if module._parameters.get(part.name) is not None else None for part in parts] + [None]
    return (Layer(name, module, kind.map_of, held[0], held[1], kind.correction, type(module)),)


_OWN_FORWARD = "its class has a forward of its own: what it does with the weight is not known"


def _kind(module: nn.Module) -> tuple[_Kind | None, bool]:
    """The kind; or None, and whether only a forward of its own is in the way."""
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return (_HF_CONV1D, False) if "forward" not in vars(module) else (None, True)
    alike = [cls for cls in KINDS if isinstance(module, cls)]
    for cls in alike:
        if _is_exactly(module, cls):
            return KINDS[cls], False
    return None, bool(alike)


def _is_exactly(module: nn.Module, cls: type[nn.Module]) -> bool:
    # A subclass that only adds to the constructor counts as the class; one with a forward of its own, or of the instance, does not.
    methods = [name for name in ("forward", "_conv_forward") if hasattr(cls, name)]
    return all(getattr(type(module), name) is getattr(cls, name) and name not in vars(module) for name in methods)


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
        packed = module.in_proj_weight is not None
        weight = Part(module, "in_proj_weight", cut) if packed else Part(module, f"{what}_proj_weight")
        bias = None if module.in_proj_bias is None else Part(module, "in_proj_bias", cut)
        yield Layer(f"{start}{what}_proj", module, _linear, weight, bias, known_as=type(module))
    bias = None if module.out_proj.bias is None else Part(module.out_proj, "bias")
    yield Layer(f"{start}out_proj", module, _linear, Part(module.out_proj, "weight"), bias, known_as=type(module))


def _linear(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return LinearMap()


def _embedding(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return EmbeddingMap(layer.padding_idx)


def _conv(layer: Any, x: Tensor, options: Sequence[Any]) -> ConvMap:
    if layer.padding_mode == "zeros":
        return ConvMap(conv_geometry(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups))
    geometry = conv_geometry(layer.kernel_size, layer.stride, 0, layer.dilation, layer.groups)
    return ConvMap(geometry, (layer._reversed_padding_repeated_twice, layer.padding_mode))


def _conv_transpose(layer: Any, x: Tensor, options: Sequence[Any]) -> ConvMap:
    sizes = layer.kernel_size, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
    geometry = conv_transpose_geometry(*sizes)
    if not options or options[0] is None:
        return ConvMap(geometry)
    wanted = list(options[0])[-len(layer.kernel_size) :]
    least = with_output_padding(geometry, (0,) * len(wanted)).output_size(x.shape[-len(wanted) :])
    return ConvMap(with_output_padding(geometry, tuple(want - size for want, size in zip(wanted, least, strict=True))))


def _affine_like(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return ScaledMap(LinearMap(), affine_like(layer.gain))


def _norm_like(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return ScaledMap(LinearMap(), norm_like(layer.gain, check_eps(layer.eps)))


def _patch_norm(layer: PatchNorm, x: Tensor, options: Sequence[Any]) -> AffineMap:
    scale = affine_like(layer.gain) if layer.form == "affine-like" else norm_like(layer.gain, check_eps(layer.eps))
    return ScaledMap(_conv_transpose(layer, x, options) if layer.transposed else _conv(layer, x, options), scale)


_HF_CONV1D = _Kind(_linear)
"""The linear layer of GPT-2 in transformers, whose weight lies transposed; known by its name."""

KINDS: dict[type[nn.Module], _Kind] = {
    nn.Linear: _Kind(_linear),
    nn.Embedding: _Kind(_embedding, ("weight",)),
    nn.Conv1d: _Kind(_conv),
    nn.Conv2d: _Kind(_conv),
    nn.Conv3d: _Kind(_conv),
    nn.ConvTranspose1d: _Kind(_conv_transpose),
    nn.ConvTranspose2d: _Kind(_conv_transpose),
    nn.ConvTranspose3d: _Kind(_conv_transpose),
    corrected.SampleCorrectedLinear: _Kind(_linear, correction="sample"),
    corrected.SampleCorrectedConv1d: _Kind(_conv, correction="sample"),
    corrected.SampleCorrectedConv2d: _Kind(_conv, correction="sample"),
    corrected.SampleCorrectedConv3d: _Kind(_conv, correction="sample"),
    corrected.BatchCorrectedLinear: _Kind(_linear, correction="batch"),
    corrected.BatchCorrectedConv1d: _Kind(_conv, correction="batch"),
    corrected.BatchCorrectedConv2d: _Kind(_conv, correction="batch"),
    corrected.BatchCorrectedConv3d: _Kind(_conv, correction="batch"),
    corrected.AffineLikeLinear: _Kind(_affine_like, correction="affine-like"),
    corrected.NormLikeLinear: _Kind(_norm_like, correction="norm-like"),
    corrected.PatchNormConv1d: _Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConv2d: _Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConv3d: _Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose1d: _Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose2d: _Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose3d: _Kind(_patch_norm, correction="structural"),
}
"""The types that are measured, with what makes the map; a subclass with the same forward counts as its class."""
