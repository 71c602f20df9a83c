# The gains with which a model of structural layers starts like its plain twin.
from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

from affine_divergence.init._layers import affine_layers, check_materialised, structural_scale

Module = TypeVar("Module", bound=nn.Module)


def hidden_gain_(model: Module) -> Module:
    r"""Set the gain of hidden structural layers to √(fan_in + 1), of the input and output layers to 1, and their biases to 0.

    Weights stay as they are. Biases are set to 0 since behind a wide input layer at gain 1 they would be most of the signal, the same
    for every sample.

    Hidden layers then have outputs of about the scale of `nn.Linear`'s on inputs of unit variance, and train at about the
    learning rate of the plain network. At gain 1 their outputs shrink from layer to layer under torch's initial weights. The input
    and the output layer are the first and the last linear or convolutional layer, plain or corrected, in the order of
    registration; all structural layers between them are hidden. For a single layer use `gain="auto"` in its constructor.

    **A state_dict does not carry gains.** Call `hidden_gain_` on a model built anew, before `load_state_dict`: after it, trained biases
    would be lost.

    Args:
        model: a model with AffineLikeLinear, NormLikeLinear, PatchNormConv or PatchNormConvTranspose layers.

    Returns:
        The model itself, changed in place.

    Shape:
        fan_in is in_features, or C_in/groups · kernel size, for transposed convolutions over the product of the strides.

    Raises:
        TypeError: model is not an nn.Module.
        ValueError: it has no structural layer, or lazy parameters.

    Source: mean-field theory of the layers of G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> from affine_divergence.nn import AffineLikeLinear
    >>> model = nn.Sequential(AffineLikeLinear(99, 8), nn.Tanh(), AffineLikeLinear(8, 3), nn.Tanh(), AffineLikeLinear(3, 2))
    >>> [layer.gain for layer in hidden_gain_(model)[::2]]
    [1.0, 3.0, 1.0]
    """
    check_materialised(model)
    layers = affine_layers(model)
    structural = [layer for layer in layers if structural_scale(layer.module) is not None]
    if not structural:
        raise ValueError(
            f"{type(model).__name__} has no AffineLikeLinear, NormLikeLinear or PatchNormConv layer whose gain could be set; "
            "plain layers have none"
        )
    for layer in structural:
        layer.module.gain = 1.0 if layer in (layers[0], layers[-1]) else math.sqrt(layer.fan_in + 1.0)
        if layer.module.bias is not None:
            nn.init.zeros_(layer.module.bias)
    return model
