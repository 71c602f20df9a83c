# Mean-field theory of layers with random weights: signal, gradient, cosine and Gram matrix from layer to layer.
#
# A layer z = t (W x + b) has n = fan_in inputs, independent weights of mean 0 and variance v, biases of variance v_b and
#     plain          t = g
#     affine-like    t = g/√(‖x‖² + 1)
#     norm-like      z = t W x + g b,  t = g/√(‖x‖² + ε)
# Of its inputs the theory knows ρ = ‖x‖², one number for all samples, and r, the cosine of two of them. Of its outputs it knows
# q = E z². Expectations are over the weights. docs/initialisation.md derives every formula and numbers the statements.
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from affine_divergence.init._moments import NONLINEARITIES, joint_moment, joint_slope, second_moment, slope_moment

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = ("plain", "affine-like", "norm-like")


@dataclass(frozen=True, kw_only=True)
class RandomLayer:
    """A linear layer or a convolution with random weights: what mean-field theory needs to know of it.

    Args:
        kind: "plain", "affine-like" or "norm-like".
        fan_in: n, the length of a row: in_features, or C_in/groups · kernel size.
        fan_out: how many outputs read one input: out_features, or C_out/groups · kernel size at stride 1.
        variance: v, of a weight.
        bias_variance: v_b, of a bias; 0 for biases that start at 0.
        gain: g, multiplies the whole map.
        eps: ε of a norm-like layer.
        bias: whether a bias learns; it is the "+ 1" of the Gram matrix.

    Raises ValueError for an unknown kind and for a size, variance, gain or ε that is out of range.

    >>> RandomLayer(kind="affine-like", fan_in=64, fan_out=64, variance=1 / 64).squared_scale(3.0)
    0.25
    """

    kind: str
    fan_in: int
    fan_out: int
    variance: float
    bias_variance: float = 0.0
    gain: float = 1.0
    eps: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, least in (("fan_in", 1), ("fan_out", 1), ("variance", 0.0), ("bias_variance", 0.0), ("eps", 0.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}")
        if not math.isfinite(self.gain):
            raise ValueError(f"gain must be finite, got {self.gain!r}")
        if self.eps and self.kind != "norm-like":
            raise ValueError(f"eps belongs to norm-like layers; leave it out of the {self.kind} layer")
        if self.bias_variance and not self.bias:
            raise ValueError(f"a layer without a bias has bias_variance 0, got {self.bias_variance:g}")

    @property
    def offset(self) -> float:
        """What is added to ‖x‖² under the root."""
        return 1.0 if self.kind == "affine-like" else self.eps

    def squared_scale(self, sqnorm: float) -> float:
        """t² at rows of squared norm ρ."""
        if self.kind == "plain":
            return self.gain**2
        if not sqnorm + self.offset > 0.0:
            raise ValueError("a norm-like layer with eps 0 divides by the norm of its rows, which is 0; give it an eps")
        return self.gain**2 / (sqnorm + self.offset)


@dataclass(frozen=True)
class Depth:
    """One layer of a chain: its rows, its Gram matrix, its outputs, and what it does to gradients.

    Attributes:
        sqnorm: ρ, the squared norm of the rows that it reads.
        cosine: r, of the rows of two samples.
        gram_cosine: κ, the cosine of two samples' effects on its parameters.
        variance: q, of an output.
        output_cosine: of the outputs of two samples.
        gradient_factor: χ, the mean squared gradient of the outputs of the layer below over that of its own; for the first layer, of
            the network's inputs.

    >>> layer = RandomLayer(kind="affine-like", fan_in=64, fan_out=64, variance=1 / 64)
    >>> (depth,) = propagate([layer], "tanh", sqnorm=1.0, cosine=0.0)
    >>> depth.gram_cosine, depth.variance * 64
    (0.5, 0.5)
    """

    sqnorm: float
    cosine: float
    gram_cosine: float
    variance: float
    output_cosine: float
    gradient_factor: float


def propagate(layers: Sequence[RandomLayer], nonlinearity: str, *, sqnorm: float, cosine: float) -> list[Depth]:
    """Follow signal, cosine and gradient through a chain of layers with an activation between them.

    Args:
        layers: in order; rows of each are fan_in activations of the layer below.
        nonlinearity: the activation: "linear", "tanh", "relu" or "leaky_relu" (slope 0.01).
        sqnorm: ρ of the rows that the first layer reads.
        cosine: r of the rows of two samples there.

    Raises ValueError for an unknown nonlinearity, a negative ρ or a cosine outside [−1, 1].

    >>> layer = RandomLayer(kind="affine-like", fan_in=64, fan_out=64, variance=2 / 64)
    >>> chain = propagate([layer] * 3, "relu", sqnorm=1.0, cosine=0.0)  # s = 1: 1/ρ grows by 1 from layer to layer
    >>> [round(depth.sqnorm, 4) for depth in chain]
    [1.0, 0.5, 0.3333]
    """
    if nonlinearity not in NONLINEARITIES:
        raise ValueError(f"nonlinearity must be one of {', '.join(NONLINEARITIES)}, got {nonlinearity!r}")
    if not (math.isfinite(sqnorm) and sqnorm >= 0.0):
        raise ValueError(f"sqnorm must be finite and at least 0, got {sqnorm!r}")
    if not -1.0 <= cosine <= 1.0:
        raise ValueError(f"cosine must be between -1 and 1, got {cosine!r}")
    found: list[Depth] = []
    slope = 1.0  # E φ′² below: nothing lies below the first layer
    for layer, above in pairwise([*layers, None]):
        assert layer is not None
        q = output_variance(layer, sqnorm)
        below = output_cosine(layer, sqnorm, cosine)
        factor = gradient_factor(layer, sqnorm, slope)
        found.append(Depth(sqnorm, cosine, gram_cosine(layer, sqnorm, cosine), q, below, factor))
        if above is not None:
            sqnorm, cosine = next_sqnorm(q, above.fan_in, nonlinearity), next_cosine(q, below, nonlinearity)
            slope = slope_moment(q, nonlinearity)
    return found


def output_variance(layer: RandomLayer, sqnorm: float) -> float:
    """The variance of an output, q = t² (v ρ + v_b); of a norm-like layer, whose bias is not divided, t² v ρ + g² v_b (S1)."""
    t2, v, v_b = layer.squared_scale(sqnorm), layer.variance, layer.bias_variance
    return t2 * v * sqnorm + (layer.gain**2 if layer.kind == "norm-like" else t2) * v_b


def bias_share(layer: RandomLayer, sqnorm: float) -> float:
    """β, the share of q that comes from the bias and is the same for all samples (S1)."""
    q = output_variance(layer, sqnorm)
    return 1.0 - layer.squared_scale(sqnorm) * layer.variance * sqnorm / q if q else 0.0


def next_sqnorm(q: float, fan_in: int, nonlinearity: str) -> float:
    """ρ′ = n′ · E φ(√q ζ)², for rows of n′ activations (S2)."""
    return fan_in * second_moment(q, nonlinearity)


def gradient_factor(layer: RandomLayer, sqnorm: float, slope: float = 1.0) -> float:
    """χ = t² v fan_out · E φ′², the ratio of mean squared gradients across a layer and the activation below it (S3).

    `slope` is E φ′² of that activation.
    """
    return layer.squared_scale(sqnorm) * layer.variance * layer.fan_out * slope


def radial_loss(layer: RandomLayer, sqnorm: float) -> float:
    """The share of the gradient that is lost along x, since the scale t depends on x: (2a − a² − a (1 − a) v_b/v)/n (S3).

    a is ρ/(ρ + ε); the last term is of affine-like layers alone. χ times one minus this is exact for one layer and a given x. In a
    chain, fluctuations of ρ from layer to layer are of the same order 1/n, which is why χ leaves it out.
    """
    if layer.kind == "plain":
        return 0.0
    a = sqnorm / (sqnorm + layer.offset)
    inside = layer.bias_variance / layer.variance if layer.kind == "affine-like" else 0.0
    return (2.0 * a - a * a - a * (1.0 - a) * inside) / layer.fan_in


def self_term(layer: RandomLayer, sqnorm: float) -> float:
    """G_ii: how far a sample moves its own outputs, per gradient and learning rate (S5)."""
    weight = layer.squared_scale(sqnorm) * sqnorm
    return weight + _bias_term(layer, sqnorm)


def gram_cosine(layer: RandomLayer, sqnorm: float, cosine: float) -> float:
    """κ = G_ij/√(G_ii G_jj) of two samples; (1 + ρ r)/(1 + ρ) with a bias, r without, but for norm-like layers (S5)."""
    weight, bias = layer.squared_scale(sqnorm) * sqnorm, _bias_term(layer, sqnorm)
    return (weight * cosine + bias) / (weight + bias) if weight + bias else cosine


def gram_condition(gram_cosine: float, rows: int) -> float:
    """(1 + (N − 1) κ)/(1 − κ), the condition of a Gram matrix with 1 on its diagonal and κ ≥ 0 elsewhere (S5)."""
    return (1.0 + (rows - 1) * gram_cosine) / (1.0 - gram_cosine) if gram_cosine < 1.0 else math.inf


def effective_rank(gram_cosine: float, rows: int) -> float:
    """(tr G)²/tr G² = N/(1 + (N − 1) κ²), of the same matrix (S5)."""
    return rows / (1.0 + (rows - 1) * gram_cosine**2)


def output_cosine(layer: RandomLayer, sqnorm: float, cosine: float) -> float:
    """(1 − β) r + β, the cosine of two samples' outputs (S6)."""
    share = bias_share(layer, sqnorm)
    return (1.0 - share) * cosine + share


def next_cosine(q: float, output_cosine: float, nonlinearity: str) -> float:
    """R(r) = E φ(z) φ(z′)/E φ(z)², the cosine of two samples' activations (S6)."""
    if q == 0.0:
        return output_cosine
    cosine = joint_moment(q, output_cosine, nonlinearity) / second_moment(q, nonlinearity)
    return min(max(cosine, -1.0), 1.0)


def cosine_slope(q: float, output_cosine: float, nonlinearity: str) -> float:
    """R′(r) = q E φ′(z) φ′(z′)/E φ(z)² (S6)."""
    return q * joint_slope(q, output_cosine, nonlinearity) / second_moment(q, nonlinearity)


def beverton_holt(sqnorm: float, rate: float, depth: int) -> float:
    """ρ after `depth` steps of ρ′ = s ρ/(1 + ρ): 1/ρ_l = s^(−l) (1/ρ_0 − 1/ρ*) + 1/ρ*, ρ* = s − 1; 1/ρ_0 + l at s = 1 (S7)."""
    if rate == 1.0:
        return 1.0 / (1.0 / sqnorm + depth)
    fixed = 1.0 / (rate - 1.0)
    return 1.0 / (rate**-depth * (1.0 / sqnorm - fixed) + fixed)


def fixed_sqnorm(layer: RandomLayer, nonlinearity: str) -> float:
    """ρ*, the squared norm that a chain of such layers settles at; 0 where the signal dies (S10).

    ρ′/ρ falls as ρ grows, so that there is one ρ* at most. Raises ValueError where the signal grows without bound, or where every ρ
    is multiplied by one number: plain layers without biases between piecewise linear activations.
    """
    if layer.kind == "plain" and not layer.bias_variance and nonlinearity != "tanh":
        factor = next_sqnorm(output_variance(layer, 1.0), layer.fan_in, nonlinearity)
        raise ValueError(f"each of these layers multiplies every squared norm by {factor:g}; there is no fixed point to find")

    def growth(exponent: float) -> float:
        rho = math.exp(exponent)
        return next_sqnorm(output_variance(layer, rho), layer.fan_in, nonlinearity) / rho - 1.0

    low, high = -200.0, 60.0
    if growth(low) <= 1e-12:  # the rounding of a critical variance
        return 0.0
    if growth(high) > 0.0:
        raise ValueError("the signal grows without bound; lower the variance or the gain")
    return math.exp(_root(growth, low, high))


def fixed_cosine(layer: RandomLayer, sqnorm: float, nonlinearity: str) -> float:
    """r*, the cosine that all pairs of samples with 0 ≤ r < 1 settle at, in a chain of such layers at their fixed ρ (S12).

    Raises ValueError where nothing moves a cosine: without an activation and without biases.
    """
    if nonlinearity == "linear" and not layer.bias_variance:
        raise ValueError("without an activation and biases every cosine stays as it is; there is no fixed point to find")
    q, share = output_variance(layer, sqnorm), bias_share(layer, sqnorm)

    def mixed(r: float) -> float:
        return (1.0 - share) * r + share

    def slope(r: float) -> float:
        return (1.0 - share) * cosine_slope(q, mixed(r), nonlinearity)

    def growth(r: float) -> float:
        return next_cosine(q, mixed(r), nonlinearity) - r

    # The map is convex and keeps 1, so that it meets the diagonal once more exactly where its slope at 1 is above 1.
    if slope(1.0) <= 1.0 + 1e-12:
        return 1.0
    if growth(0.0) < 1e-15:
        return 0.0
    return _root(growth, 0.0, _root(lambda r: 1.0 - slope(r), 0.0, 1.0))


def patch_products(products: NDArray[np.float64], taps: Sequence[int]) -> NDArray[np.float64]:
    """patch_p·patch_q for all positions of a ring, from the products x_p·x_q of its pixels: a sum along the diagonal (S18).

    >>> patch_products(np.eye(4), [0, 1])[0]  # pixels that are not alike: patches 0 and 1 share a pixel, at different taps
    array([2., 0., 0., 0.])
    """
    return sum((np.roll(products, (-tap, -tap), (0, 1)) for tap in taps), np.zeros_like(products))


def _bias_term(layer: RandomLayer, sqnorm: float) -> float:
    if not layer.bias:
        return 0.0
    return layer.gain**2 if layer.kind == "norm-like" else layer.squared_scale(sqnorm)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    # Where a function that is positive at low and not at high changes its sign, by bisection.
    while low < (middle := 0.5 * (low + high)) < high:
        low, high = (middle, high) if falling(middle) > 0.0 else (low, middle)
    return high
