# The affine layers of a model as an initialisation sees them: sizes, gain, and the variance of their outputs.
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from affine_divergence.diagnostics._kinds import HF_CONV1D, kind_of
from affine_divergence.functional._arguments import check_eps
from affine_divergence.functional._scale import Scale, affine_like, norm_like
from affine_divergence.init._moments import variance_for
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear
from affine_divergence.nn._gain import fan_in
from affine_divergence.nn._patch_norm import PatchNorm


@dataclass(frozen=True)
class AffineLayer:
    """A linear or convolutional layer, plain or corrected, with its name in the model."""

    name: str
    module: Any
    fan_in: float
    """The mean number of inputs that reach one output."""
    outputs: int
    """Features or channels."""
    fan_out: float
    """The inputs of a row of the next layer, if that has the same kernel, stride and groups."""

    def __str__(self) -> str:
        return f"{self.name or 'the module'} ({type(self.module).__name__})"

    def variance_per_weight(self, signal: float) -> float:
        """E z²/Var W for input rows of squared norm signal and no bias."""
        scale = structural_scale(self.module)
        return signal if scale is None else scale.gain**2 * signal / (signal + scale.offset)

    def width_of_next(self, following: AffineLayer | None) -> float | None:
        """The inputs of a row of the following layer, None where that layer's size cannot be that of a reader of this one."""
        if following is None:
            return float(self.outputs)
        if hasattr(following.module, "kernel_size"):
            reads = following.module.in_channels == self.outputs
        else:
            reads = following.fan_in > 0 and following.fan_in % self.outputs == 0  # a multiple where positions were flattened
        return following.fan_in if reads else None


def structural_scale(module: nn.Module) -> Scale | None:
    """What a structural layer multiplies its rows by; None: another layer."""
    if isinstance(module, AffineLikeLinear) or (isinstance(module, PatchNorm) and module.form == "affine-like"):
        return affine_like(module.gain)
    if isinstance(module, (NormLikeLinear, PatchNorm)):
        return norm_like(module.gain, check_eps(module.eps))
    return None


def affine_layer(name: str, module: Any) -> AffineLayer | None:
    """The module as a layer; None where it is none, or has a forward of its own."""
    kind, _ = kind_of(module)
    if kind is None or isinstance(module, nn.Embedding):
        return None
    if kind is HF_CONV1D:
        inputs, outputs = module.weight.shape  # transposed, in GPT-2 of transformers
        return AffineLayer(name, module, float(inputs), outputs, float(outputs))
    if not hasattr(module, "kernel_size"):
        return AffineLayer(name, module, fan_in(module), module.out_features, float(module.out_features))
    taps = math.prod(module.kernel_size) / (math.prod(module.stride) if module.transposed else 1)
    return AffineLayer(name, module, fan_in(module), module.out_channels, module.out_channels // module.groups * taps)


def affine_layers(model: nn.Module) -> list[AffineLayer]:
    """In the order of registration, each module once; without the projection inside nn.MultiheadAttention, which is never called."""
    inside = {id(part) for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.children()}
    found = (affine_layer(name, module) for name, module in model.named_modules() if id(module) not in inside)
    return [layer for layer in found if layer is not None]


def output_variance(layer: AffineLayer, signal: float, width: float, nonlinearity: str) -> float:
    """The variance of an output at which width activations of it have the squared norm signal."""
    if nonlinearity == "tanh" and signal >= 0.99 * width:
        raise ValueError(
            f"signal must be below {0.99 * width:g} for {layer}: {width:g} Tanh activations have a squared norm below {width:g} and "
            f"near it they are saturated, got {signal:g}"
        )
    return variance_for(signal / width, nonlinearity)


def check_materialised(model: Any) -> None:
    """That it is a module whose parameters have shapes and values."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{name} is lazy and has no shape yet; run one forward first")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the device meta and has no values; call model.to_empty(device=…) first")


def check_signal(name: str, signal: Any) -> float:
    """A squared norm as a number."""
    if isinstance(signal, bool) or not isinstance(signal, (int, float)):
        raise TypeError(f"{name} must be a number, the mean squared norm of a row, got {type(signal).__name__}")
    if not 0.0 < signal < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {signal!r}")
    return float(signal)


def owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """By the id of each parameter, the modules that hold it, with their names; each module once."""
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in own_parameters(module):
            found.setdefault(id(parameter), []).append((name, module))
    return found


def own_parameters(module: nn.Module) -> Iterator[torch.nn.Parameter]:
    """Those registered on the module itself, not on its children."""
    return (parameter for parameter in module._parameters.values() if parameter is not None)
