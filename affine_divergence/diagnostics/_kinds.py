# The types that are measured, by one table: what affine map a layer of each is at the input of a call.
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from affine_divergence import nn as corrected
from affine_divergence.diagnostics._maps import AffineMap, ConvMap, EmbeddingMap, LinearMap, ScaledMap
from affine_divergence.functional._arguments import check_eps
from affine_divergence.functional._geometry import conv_geometry, conv_transpose_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.nn._patch_norm import PatchNorm

if TYPE_CHECKING:
    from torch import Tensor

MapOf = Callable[[Any, "Tensor", Sequence[Any]], AffineMap]


@dataclass(frozen=True)
class Kind:
    """How a type is measured: its map, the names of its parameters, and what correction it has already."""

    map_of: MapOf
    parameters: tuple[str, ...] = ("weight", "bias")
    correction: str = "none"


def kind_of(module: nn.Module) -> tuple[Kind | None, bool]:
    """The kind; or None, and whether only a forward of its own is in the way."""
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return (HF_CONV1D, False) if is_exactly(module, type(module)) else (None, True)
    alike = [cls for cls in KINDS if isinstance(module, cls)]
    for cls in alike:
        if is_exactly(module, cls):
            return KINDS[cls], False
    return None, bool(alike)


def is_exactly(module: nn.Module, cls: type[nn.Module]) -> bool:
    # A subclass that only adds to the constructor counts as the class; one with a forward of its own, or of the instance, does not.
    methods = [name for name in METHODS if hasattr(cls, name)]
    return all(_function(module, name) is getattr(cls, name) for name in methods)


METHODS = ("forward", "_conv_forward")
_MOVES = ("AlignDevicesHook", "CpuOffload")  # hooks of accelerate that move tensors between devices and do nothing else


def _function(module: nn.Module, name: str) -> Any:
    """What runs as this method; of a forward that is only wrapped to move tensors, the one inside."""
    if name not in vars(module):
        return getattr(type(module), name)
    hook, inside = vars(module).get("_hf_hook"), vars(module).get("_old_forward")
    hooks = getattr(hook, "hooks", [hook])
    if name != "forward" or not all(type(one).__module__ == "accelerate.hooks" and type(one).__name__ in _MOVES for one in hooks):
        return None
    return getattr(inside, "__func__", None) if getattr(inside, "__self__", None) is module else None


def linear(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
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
    least = replace(geometry, output_padding=(0,) * len(wanted)).output_size(x.shape[-len(wanted) :])
    return ConvMap(replace(geometry, output_padding=tuple(want - size for want, size in zip(wanted, least, strict=True))))


def _affine_like(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return ScaledMap(LinearMap(), affine_like(layer.gain))


def _norm_like(layer: Any, x: Tensor, options: Sequence[Any]) -> AffineMap:
    return ScaledMap(LinearMap(), norm_like(layer.gain, check_eps(layer.eps)))


def _patch_norm(layer: PatchNorm, x: Tensor, options: Sequence[Any]) -> AffineMap:
    scale = affine_like(layer.gain) if layer.form == "affine-like" else norm_like(layer.gain, check_eps(layer.eps))
    return ScaledMap(_conv_transpose(layer, x, options) if layer.transposed else _conv(layer, x, options), scale)


HF_CONV1D = Kind(linear)
"""The linear layer of GPT-2 in transformers, whose weight lies transposed; known by its name."""

KINDS: dict[type[nn.Module], Kind] = {
    nn.Linear: Kind(linear),
    nn.Embedding: Kind(_embedding, ("weight",)),
    nn.Conv1d: Kind(_conv),
    nn.Conv2d: Kind(_conv),
    nn.Conv3d: Kind(_conv),
    nn.ConvTranspose1d: Kind(_conv_transpose),
    nn.ConvTranspose2d: Kind(_conv_transpose),
    nn.ConvTranspose3d: Kind(_conv_transpose),
    corrected.SampleCorrectedLinear: Kind(linear, correction="sample"),
    corrected.SampleCorrectedConv1d: Kind(_conv, correction="sample"),
    corrected.SampleCorrectedConv2d: Kind(_conv, correction="sample"),
    corrected.SampleCorrectedConv3d: Kind(_conv, correction="sample"),
    corrected.BatchCorrectedLinear: Kind(linear, correction="batch"),
    corrected.BatchCorrectedConv1d: Kind(_conv, correction="batch"),
    corrected.BatchCorrectedConv2d: Kind(_conv, correction="batch"),
    corrected.BatchCorrectedConv3d: Kind(_conv, correction="batch"),
    corrected.AffineLikeLinear: Kind(_affine_like, correction="affine-like"),
    corrected.NormLikeLinear: Kind(_norm_like, correction="norm-like"),
    corrected.PatchNormConv1d: Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConv2d: Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConv3d: Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose1d: Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose2d: Kind(_patch_norm, correction="structural"),
    corrected.PatchNormConvTranspose3d: Kind(_patch_norm, correction="structural"),
}
"""The types that are measured, with what makes the map; a subclass with the same forward counts as its class."""
