# Random networks of the project's own layers, measured as mean-field theory describes them.
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from affine_divergence.functional import affine_like_linear, norm_like_linear
from affine_divergence.init import Depth, RandomLayer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda z: z,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
}


def inputs_like(samples: int, features: int, *, sqnorm: float, cosine: float, generator: torch.Generator) -> Tensor:
    """Random rows in float64, each of the squared norm given, whose pairs have the cosine given on average."""
    shared = torch.randn(1, features, generator=generator, dtype=torch.float64)
    own = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    x: Tensor = cosine**0.5 * shared + (1.0 - cosine) ** 0.5 * own
    x *= sqnorm**0.5 / x.norm(dim=1, keepdim=True)
    return x


def measured(layers: Sequence[RandomLayer], nonlinearity: str, x: Tensor, generator: torch.Generator) -> list[Depth]:
    """Draw one network, and measure every layer on the rows of x: means over samples, over pairs, and over outputs."""
    rows: list[Tensor] = [x.requires_grad_()]
    outputs: list[Tensor] = []
    for place, layer in enumerate(layers):
        if place:
            rows.append(ACTIVATIONS[nonlinearity](outputs[-1]))
        outputs.append(_random_map(layer, rows[-1], generator))
    upstream = torch.randn(outputs[-1].shape, generator=generator, dtype=x.dtype)
    gradients = torch.autograd.grad(outputs[-1], [x, *outputs], upstream)
    sizes = [gradient.square().mean().item() for gradient in gradients]
    found = []
    for layer, row, z, below, own in zip(layers, rows, outputs, sizes, sizes[1:], strict=False):
        sqnorm, variance = row.square().sum(1).mean().item(), z.square().mean().item()
        found.append(Depth(sqnorm, _cosine(row), _cosine(_gram_rows(layer, row)), variance, _cosine(z), below / own))
    return found


def _random_map(layer: RandomLayer, x: Tensor, generator: torch.Generator) -> Tensor:
    def normal(variance: float, *shape: int) -> Tensor:
        drawn: Tensor = variance**0.5 * torch.randn(*shape, generator=generator, dtype=x.dtype)
        return drawn

    weight, bias = normal(layer.variance, layer.fan_out, layer.fan_in), normal(layer.bias_variance, layer.fan_out)
    if layer.kind == "plain":
        return torch.nn.functional.linear(x, layer.gain * weight, layer.gain * bias)
    if layer.kind == "affine-like":
        return affine_like_linear(x, weight, bias, gain=layer.gain)
    return norm_like_linear(x, weight, bias, gain=layer.gain, eps=layer.eps)


def _gram_rows(layer: RandomLayer, x: Tensor) -> Tensor:
    # What the gradient of a sample's output by the weights and the bias of one unit is made of.
    rows = x if layer.kind == "plain" else x / (x.square().sum(1, keepdim=True) + layer.offset).sqrt()
    ones = torch.ones_like(x[:, :1]) if layer.kind != "affine-like" else (x.square().sum(1, keepdim=True) + 1.0).rsqrt()
    return torch.cat([rows, ones], dim=1) if layer.bias else rows


def _cosine(rows: Tensor) -> float:
    # The mean product of two samples over the mean squared norm.
    products = rows @ rows.mT
    samples = len(rows)
    return float(((products.sum() - products.trace()) / (samples - 1) / products.trace()).item())
