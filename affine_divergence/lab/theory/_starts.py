# The starts that the figure compares, and what theory and random networks say of each.
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from affine_divergence.init import Depth, RandomLayer, propagate
from affine_divergence.init._moments import second_moment, variance_for

TINY = 1e-12  # of a pre-activation's variance: there every activation acts as it does at 0
SIGNAL = 1.0  # τ of the fixed point

Start = Callable[[int, int, bool, str], RandomLayer]


def _torch(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    # nn.Linear draws weights and biases uniformly in ±1/√fan_in.
    v = 1.0 / (3.0 * fan_in)
    return RandomLayer(kind="affine-like", fan_in=fan_in, fan_out=fan_out, variance=v, bias_variance=v)


def _no_biases(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    return replace(_torch(fan_in, fan_out, first, nonlinearity), bias_variance=0.0)


def _critical(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    return replace(_no_biases(fan_in, fan_out, first, nonlinearity), variance=TINY / (second_moment(TINY, nonlinearity) * fan_out))


def _hidden_gain(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    return replace(_no_biases(fan_in, fan_out, first, nonlinearity), gain=1.0 if first else math.sqrt(fan_in + 1))


def _hidden_gain_biases(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    return replace(_torch(fan_in, fan_out, first, nonlinearity), gain=1.0 if first else math.sqrt(fan_in + 1))


def _fixed_point(fan_in: int, fan_out: int, first: bool, nonlinearity: str) -> RandomLayer:
    # fan_out · E φ(√q ζ)² = τ, and q = Var W · ρ/(1 + ρ).
    q, rows = variance_for(SIGNAL / fan_out, nonlinearity), float(fan_in) if first else SIGNAL
    return replace(_no_biases(fan_in, fan_out, first, nonlinearity), variance=q * (1.0 + rows) / rows)


STARTS: dict[str, Start] = {
    "nn.Linear's weights and biases": _torch,
    "nn.Linear's weights, biases 0": _no_biases,
    "critical variance 1/(c fan_out)": _critical,
    "A: hidden-gain, biases 0": _hidden_gain,
    "A with nn.Linear's biases": _hidden_gain_biases,
    "B: fixed point, τ = 1": _fixed_point,
}


@dataclass(frozen=True)
class Curve:
    """Values after 1, 2, … hidden layers.

    Attributes:
        sqnorm: ρ of the activations.
        gradient: the mean squared gradient of the pre-activations over that after the last of the layers.
        gram_gap: 1 − κ of the layer that reads them.
    """

    sqnorm: list[float]
    gradient: list[float]
    gram_gap: list[float]


@dataclass(frozen=True)
class Followed:
    """One start through depth: by theory, and in each random network."""

    start: str
    nonlinearity: str
    theory: Curve
    networks: list[Curve]


def follow(nonlinearity: str, *, features: int, width: int, depth: int, networks: int, samples: int = 8, seed: int = 0) -> list[Followed]:
    """Every start, by theory and in random networks on uncorrelated inputs of unit variance."""
    import torch

    from affine_divergence.lab.theory._networks import inputs_like, measured

    found = []
    for name, start in STARTS.items():
        layers = [start(features if place == 0 else width, width, place == 0, nonlinearity) for place in range(depth + 1)]
        curves = []
        for network in range(networks):
            generator = torch.Generator().manual_seed(seed + network)
            x = inputs_like(samples, features, sqnorm=float(features), cosine=0.0, generator=generator)
            curves.append(_curve(measured(layers, nonlinearity, x, generator)))
        theory = propagate(layers, nonlinearity, sqnorm=float(features), cosine=0.0)
        found.append(Followed(name, nonlinearity, _curve(theory), curves))
    return found


def _curve(depths: Sequence[Depth]) -> Curve:
    read = depths[1:]  # by these layers, after 1, 2, … hidden ones
    # A factor leads from the outputs of the layer to those of the layer below it.
    gradient = list(accumulate((depth.gradient_factor for depth in read[:0:-1]), lambda a, b: a * b, initial=1.0))[::-1]
    return Curve([depth.sqnorm for depth in read], gradient, [1.0 - depth.gram_cosine for depth in read])


def mean_of_logs(values: Sequence[float]) -> float:
    """The geometric mean: factors multiply through depth, so that single networks scatter evenly in their logarithm."""
    return math.exp(sum(math.log(max(value, 1e-300)) for value in values) / len(values))


def table(found: Sequence[Followed], layers: Sequence[int]) -> Iterator[str]:
    """Lines of text: theory and the geometric mean of the networks after the given hidden layers."""
    for nonlinearity in dict.fromkeys(one.nonlinearity for one in found):
        yield f"{nonlinearity}: theory/networks after {', '.join(map(str, layers))} hidden layers"
        for one in (one for one in found if one.nonlinearity == nonlinearity):
            yield f"  {one.start}"
            for label, name in (("‖x‖²", "sqnorm"), ("gradient", "gradient"), ("1 − κ", "gram_gap")):
                cells = []
                for layer in layers:
                    seen = mean_of_logs([getattr(curve, name)[layer - 1] for curve in one.networks])
                    cells.append(f"{getattr(one.theory, name)[layer - 1]:.2e}/{seen:.2e}")
                yield f"    {label:<10}{'   '.join(cells)}"
