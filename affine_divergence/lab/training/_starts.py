# What a start means for each layer of each method: initial weights, and the scale at which the layer takes its normalised input.
#
# A layer in the method's own terms is z = W (c·n(x)) + b for a normaliser n of unit mean square, g (W x + b)/√(‖x‖² + 1) for affine-like
# and g (W x/‖x‖ + b) for norm-like. Stacks train V = cW, or gW and gb, instead. That is exactly the same net if V's learning rate is c²
# times W's (or g²) under gradient descent, and if its rate is c times W's, its ε and weight decay 1/c times, under AdamW.
#
# start         weights                                  g of a correction              c of a normaliser
# torch         nn.Linear's: variance 1/(3 fan-in)       1                              1
# xavier        variance 2/(fan-in + fan-out)            1                              1
# glorot-he     Tanh: as xavier; Leaky-ReLU: He's        √(fan-in + 1)                  1
# orthogonal    rows, or columns, orthogonal             √(fan-in + 1)                  1
# hidden-gain   nn.Linear's                              √(fan-in + 1) between, else 1  1 between, else 1/√fan-in
# fixed-point   each row keeps the squared norm `signal` 1                              1/√fan-in
# “Between” are all layers but the first and the last. A given gain replaces g in every layer. All draws but the orthogonal ones are
# those of nn.Linear, scaled: a seed means the same draw at every start.
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from affine_divergence.init._moments import LEAKY_SLOPE, variance_for
from affine_divergence.lab.pattern import kernels
from affine_divergence.lab.training._seeds import initial_weight, orthogonal_weight
from affine_divergence.lab.trial import GAINED, GRADIENT_ONLY, NAMED_GAIN, Trial

HE = 2.0 / (1.0 + LEAKY_SLOPE**2)  # fan-in × variance, which Leaky-ReLU halves


class Layer(NamedTuple):
    """The place of an affine layer, or of a convolution, in its net."""

    number: int  # from 0
    last: bool
    fan_in: int  # numbers of a row, or of a patch
    fan_out: int  # numbers of a row, or of a patch of the layer after it, that this layer gives; for Glorot's rule
    outputs: int


class Scales(NamedTuple):
    """V over W, and the same of the biases."""

    weight: float
    bias: float


def layers_of(trial: Trial, shape: tuple[int, int, int], classes: int) -> list[Layer]:
    """The affine layers, or convolutions and the affine layer, of a trial's net for images (C, H, W)."""
    if trial.pattern is None:
        sizes = [math.prod(shape), *[trial.width] * trial.depth, classes]
        return [Layer(i, i == trial.depth, n_in, n_out, n_out) for i, (n_in, n_out) in enumerate(itertools.pairwise(sizes))]
    areas = [kernel.size**2 for kernel in kernels(trial.pattern, trial.depth)] + [1]
    channels = [shape[0], *[trial.width] * trial.depth]
    found = [
        Layer(i, False, n_in * area, n_out * after, n_out)
        for i, ((n_in, n_out), (area, after)) in enumerate(zip(itertools.pairwise(channels), itertools.pairwise(areas), strict=True))
    ]
    return [*found, Layer(trial.depth, True, trial.width, classes, classes)]


def scales_of(trial: Trial, layer: Layer) -> Scales:
    """How many times the trained weights and biases of a layer are those in the method's own terms."""
    if trial.method in ("none", *GRADIENT_ONLY, *NAMED_GAIN):  # a gain in the method's name is applied by the method itself
        return Scales(1.0, 1.0)
    if trial.method in GAINED:
        gain = _gain(trial, layer)
        return Scales(gain, gain)
    edge = layer.number == 0 or layer.last
    unit_norm = trial.start == "fixed-point" or (trial.start == "hidden-gain" and edge)
    return Scales(layer.fan_in**-0.5 if unit_norm else 1.0, 1.0)


def initial_of(trial: Trial, layer: Layer) -> Tensor:
    """The (fan-in, outputs) initial weight of a layer as it is trained, W times its scale; in float64 where it is scaled."""
    scale = scales_of(trial, layer).weight
    if trial.start == "orthogonal":
        drawn = orthogonal_weight(trial.seed, layer.number, layer.fan_in, layer.outputs)
        return drawn * (scale * (1.0 if layer.last or trial.activation == "tanh" else math.sqrt(HE)))
    drawn = initial_weight(trial.seed, layer.number, layer.fan_in, layer.outputs)
    if trial.start in ("torch", "hidden-gain"):
        return drawn if scale == 1.0 else drawn.double() * scale
    return drawn.double() * math.sqrt(3.0 * layer.fan_in * _trained_variance(trial, layer, scale))


def _trained_variance(trial: Trial, layer: Layer, scale: float) -> float:
    # Of the weights as they are trained, V.
    if trial.start == "fixed-point":
        return _fixed_point_variance(trial, layer)
    if trial.start == "glorot-he" and trial.activation == "leaky-relu":
        return scale**2 * (1.0 if layer.last else HE) / layer.fan_in
    return scale**2 * 2.0 / (layer.fan_in + layer.fan_out)


def _fixed_point_variance(trial: Trial, layer: Layer) -> float:
    # So that the next layer's rows have the squared norm `signal` on average if this layer's have it; pixels have unit variance.
    signal = trial.signal or 1.0
    nonlinearity = "linear" if layer.last else trial.activation.replace("-", "_")
    q = variance_for(signal / layer.fan_out, nonlinearity)
    square = float(layer.fan_in) if layer.number == 0 else signal  # ‖x‖² of this layer's rows
    if trial.method in ("none", *GRADIENT_ONLY):
        return q / square
    if trial.method == "affine-like":
        return q * (1.0 + square) / square
    return q if trial.method == "norm-like" else q / layer.fan_in


def _gain(trial: Trial, layer: Layer) -> float:
    if trial.gain is not None:
        return math.sqrt(layer.fan_in + 1) if trial.gain == "auto" else trial.gain
    edge = layer.number == 0 or layer.last
    unit_mean_square = trial.start in ("glorot-he", "orthogonal") or (trial.start == "hidden-gain" and not edge)
    return math.sqrt(layer.fan_in + 1) if unit_mean_square else 1.0


class Factors(NamedTuple):
    """What gradient descent multiplies the learning rates of a layer's weights and biases by, (K, 1, 1); None where that is 1 for all."""

    weight: Tensor | None
    bias: Tensor | None


def rate_factors(trials: Sequence[Trial], layer: Layer, like: Tensor) -> Factors:
    """The squares of the scales of a layer, replica by replica."""
    scales = [scales_of(trial, layer) for trial in trials]
    squares = ([one.weight**2 for one in scales], [one.bias**2 for one in scales])
    return Factors(*(_column(values, like) if set(values) != {1.0} else None for values in squares))


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(like).view(-1, 1, 1)
