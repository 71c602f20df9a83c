# Weights with which a chain of layers keeps the squared norm of its rows at a given value.
from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn

from affine_divergence.init._layers import (
    AffineLayer,
    affine_layer,
    affine_layers,
    check_materialised,
    check_signal,
    output_variance,
    own_parameters,
    owners,
)

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def signal_(
    module: Module,
    signal: float = 1.0,
    *,
    nonlinearity: str = "tanh",
    input_signal: float | None = None,
    output_nonlinearity: str = "linear",
    generator: torch.Generator | None = None,
) -> Module:
    r"""Draw Gaussian weights with which every layer's input rows have the mean squared norm `signal`; set biases to zero.

    A row is what one output is made of: for a convolution the patch of a position and group. Let n be the length of the
    next layer's rows and ρ the mean squared norm of this layer's. The variance q of an output solves n · E φ(√q ζ)² = signal,
    ζ ~ N(0, 1), and the weights follow from it:

        affine-like                 q = gain² · Var W · ρ/(1 + ρ)
        norm-like                   q = gain² · Var W · ρ/(ρ + ε)
        plain, sample, batch        q = Var W · ρ

    For equal widths and gain 1, affine-like layers then pass activations and gradients through any depth at unchanged scale.

    Args:
        module: a linear or convolutional layer, plain or corrected, or a model that is a chain of such layers in their order
            of registration, with parameterless activations between them.
        signal: the mean squared norm of a row. A Tanh saturates: it must be below 0.99 n.
        nonlinearity: the activation after each layer: "linear", "tanh", "relu" or "leaky_relu" (slope 0.01).
        input_signal: the mean squared norm of the rows that the first layer reads. None means `signal` for a layer alone,
            and for a model the first layer's fan_in: inputs of unit mean square.
        output_nonlinearity: the activation after the last layer of a model; the output's rows get the norm `signal` too.
        generator: random numbers; None: torch's default ones.

    Returns:
        The module itself, changed in place.

    Shape:
        any. n is `in_features` of the next layer, or its C_in/groups · kernel size. Of a convolution alone n is its own
        C_out/groups · kernel size. Padded borders are not accounted for.

    Raises:
        TypeError: module is not an nn.Module, or a number is none.
        ValueError: a signal is not positive, or out of a Tanh's reach; the nonlinearity is unknown; the module has no such
            layer, is visibly not a chain, or holds parameters whose effect is unknown (normalisers, embeddings, attention,
            parametrised or shared weights): `calibrate_` starts such models from a batch.

    Source: mean-field theory of the layers of G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> from affine_divergence.nn import AffineLikeLinear
    >>> layer = signal_(AffineLikeLinear(64, 64), 1.0, generator=torch.Generator().manual_seed(0))
    >>> print(f"{layer.weight.var() * 64:.1f}")  # (1 + 1)/1 at gain 1, a little more for a Tanh
    2.0
    >>> x = torch.nn.functional.normalize(torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)))
    >>> print(f"{layer(x).tanh().square().sum(1).mean():.1f}")
    1.0
    """
    check_materialised(module)
    signal = check_signal("signal", signal)
    alone = affine_layer("", module)
    layers = affine_layers(module) if alone is None else [alone]
    _check_layers(module, layers)
    if input_signal is None:
        input_signal = signal if alone is not None else max(layers[0].fan_in, 1.0)
    row = check_signal("input_signal", input_signal)
    deviations = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        width = alone.fan_out if alone is not None else layer.width_of_next(following)
        if width is None:
            assert following is not None
            raise ValueError(
                f"{layer} has {layer.outputs} outputs and {following}, registered next, reads {following.fan_in:g} inputs a row: "
                "the model is not a chain in the order of registration; use calibrate_ with a batch"
            )
        activation = output_nonlinearity if following is None and alone is None else nonlinearity
        deviations.append(math.sqrt(output_variance(layer, signal, width, activation) / layer.variance_per_weight(row)))
        row = signal
    for layer, deviation in zip(layers, deviations, strict=True):
        weight, bias = layer.module.weight, layer.module.bias
        # Drawn in float32 or wider, so that narrow dtypes get the same numbers, rounded.
        wide = torch.promote_types(weight.dtype, torch.float32)
        weight.copy_(torch.empty(weight.shape, dtype=wide, device=weight.device).normal_(0.0, deviation, generator=generator))
        if bias is not None:
            bias.zero_()
    return module


def _check_layers(module: nn.Module, layers: list[AffineLayer]) -> None:
    if not layers:
        raise ValueError(f"{type(module).__name__} has no linear or convolutional layer to initialise")
    held, own = owners(module), {id(layer.module) for layer in layers}
    for layer in layers:
        weight = layer.module._parameters.get("weight")
        if weight is None:
            raise ValueError(f"the weight of {layer} is computed from other parameters (parametrised or pruned); initialise it before that")
        if not weight.numel():
            raise ValueError(f"the weight of {layer} has no entries, its shape is {tuple(weight.shape)}")
        sharers = [name for name, _ in held[id(weight)]]
        if len(sharers) > 1:
            raise ValueError(f"{' and '.join(sharers)} share one weight; one draw cannot serve both: use calibrate_ with a batch")
    for name, part in module.named_modules():
        if id(part) not in own and next(own_parameters(part), None) is not None:
            raise ValueError(
                f"{name or 'the module'} ({type(part).__name__}) holds parameters whose effect on the signal is unknown; initialise the "
                "layers one by one, or use calibrate_ with a batch"
            )
