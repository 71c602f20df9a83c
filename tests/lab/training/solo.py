# The slow, obvious way to run a trial: torch's own modules, autograd and optimisers in a hand-written loop.
from __future__ import annotations

import itertools
import math

import torch
from torch import nn

import affine_divergence as ad
from affine_divergence.init._moments import variance_for
from affine_divergence.lab.data import Splits
from affine_divergence.lab.pattern import kernels
from affine_divergence.lab.training._seeds import image_order, initial_weight, orthogonal_weight
from affine_divergence.lab.trial import FOOF_DECAY, FOOF_REFRESH, GRADIENT_ONLY, Trial


class BatchNorm(nn.BatchNorm1d):
    """Running statistics for a batch of one row, which torch refuses."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and len(input) == 1:
            return nn.functional.batch_norm(input, self.running_mean, self.running_var, training=False, eps=self.eps)
        return super().forward(input)


NORMS = {
    "batch-norm": lambda d: BatchNorm(d, affine=False),
    "layer-norm": lambda d: nn.LayerNorm(d, elementwise_affine=False),
    # Without eps torch takes the epsilon of the dtype, so a float64 run would be another function.
    "rms-norm": lambda d: nn.RMSNorm(d, eps=torch.finfo(torch.float32).eps, elementwise_affine=False),
}
NORMS |= {f"{name}-{over}": NORMS[name] for name in ("layer-norm", "rms-norm") for over in ("sample", "position")}  # of the head
LINEAR = {"norm-like": ad.nn.NormLikeLinear, "affine-like": ad.nn.AffineLikeLinear}


class Corrected(nn.Linear):
    """A gradient-only correction, written out: after the backward the plain gradient is replaced by the solution of a dense system."""

    def __init__(self, n_in: int, n_out: int, trial: Trial) -> None:
        super().__init__(n_in, n_out)
        self.trial = trial
        self.averaged: list[torch.Tensor] = []  # X̃ᵀX̃/N of every step

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        z = super().forward(input)
        if self.training and z.requires_grad:
            rows = torch.cat([input.detach(), torch.ones_like(input[:, :1])], 1)
            z.register_hook(lambda g: self.seen.append((rows, g)))
            self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        return z

    def correct(self) -> None:
        (rows, g), n = self.seen[0], len(self.seen[0][0])
        damping, one = self.trial.damping, torch.eye(rows.shape[1], dtype=rows.dtype)
        if self.trial.method == "sample":
            change = (g / (rows * rows).sum(1, keepdim=True)).T @ rows
        elif self.trial.method == "batch":
            dual = rows @ rows.T
            change = g.T @ torch.linalg.solve(dual + damping * dual.trace() / n * torch.eye(n, dtype=rows.dtype), rows)
        else:
            self.averaged.append(rows.T @ rows / n)
            if len(self.averaged) % FOOF_REFRESH == 1:
                weights = [FOOF_DECAY**age for age in reversed(range(len(self.averaged)))]
                average = sum(w * a for w, a in zip(weights, self.averaged, strict=True)) / sum(weights)
                self.inverse = torch.linalg.inv(average + damping * average.trace() / n * one)
            change = g.T @ rows @ self.inverse / n
        self.weight.grad, self.bias.grad = change[:, :-1].clone(), change[:, -1].clone()


class Times(nn.Module):
    """Multiplies by a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.number


def gain_of(trial: Trial, n_in: int, *, edge: bool) -> float:
    """The gain of a correction, by the table in docs/lab.md."""
    if trial.gain is not None:
        return math.sqrt(n_in + 1) if trial.gain == "auto" else trial.gain
    if trial.start in ("glorot-he", "orthogonal") or (trial.start == "hidden-gain" and not edge):
        return math.sqrt(n_in + 1)
    return 1.0


def weight_of(trial: Trial, layer: int, n_in: int, n_out: int, fan_out: int, *, gain: float, scale: float) -> torch.Tensor:
    """The (n_out, n_in) initial weight, from the uniform draw in ±1/√n_in that nn.Linear would make."""
    last, leaky = layer == trial.depth, trial.activation == "leaky-relu"
    unit = initial_weight(trial.seed, layer, n_in, n_out).T.double() * n_in**0.5  # uniform in ±1: variance 1/3
    if trial.start in ("torch", "hidden-gain"):
        return unit / n_in**0.5
    if trial.start == "orthogonal":
        weight = orthogonal_weight(trial.seed, layer, n_in, n_out).T
        return weight * (math.sqrt(2.0 / (1.0 + 0.01**2)) if leaky and not last else 1.0)
    if trial.start == "xavier" or (trial.start == "glorot-he" and not leaky):
        return unit * math.sqrt(6.0 / (n_in + fan_out))  # torch.nn.init.xavier_uniform_
    if trial.start == "glorot-he":
        return unit * math.sqrt(3.0 / n_in) * (1.0 if last else math.sqrt(2.0 / (1.0 + 0.01**2)))  # torch.nn.init.kaiming_uniform_
    q = variance_for(trial.signal / fan_out, "linear" if last else "leaky_relu" if leaky else "tanh")  # of what the layer gives
    square = n_in if layer == 0 else trial.signal
    if trial.method == "affine-like":
        variance = q * (square + 1.0) / square / gain**2
    elif trial.method == "norm-like":
        variance = q / gain**2
    elif trial.method in ("none", *GRADIENT_ONLY):
        variance = q / square
    else:
        variance = q / (scale**2 * n_in)  # a normalised input has n_in numbers of unit mean square, times the scale
    return unit * math.sqrt(3.0 * variance)


def scale_of(trial: Trial, n_in: int, *, edge: bool) -> float:
    """What a normaliser's output is multiplied by."""
    return n_in**-0.5 if trial.start == "fixed-point" or (trial.start == "hidden-gain" and edge) else 1.0


def solo_net(trial: Trial, features: int, classes: int) -> nn.Sequential:
    sizes = [features, *[trial.width] * trial.depth, classes]
    layers: list[nn.Module] = []
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        edge = layer in (0, trial.depth)
        gain, scale = gain_of(trial, n_in, edge=edge), scale_of(trial, n_in, edge=edge)
        if layer:
            layers.append(nn.Tanh() if trial.activation == "tanh" else nn.LeakyReLU(0.01))
        if trial.method in NORMS:
            layers += [NORMS[trial.method](n_in), Times(scale)]
        if trial.method in GRADIENT_ONLY:
            linear: nn.Module = Corrected(n_in, n_out, trial)
        elif trial.method in LINEAR:
            linear = LINEAR[trial.method](n_in, n_out, gain=gain)
        else:
            linear = nn.Linear(n_in, n_out)
        linear = linear.double()
        with torch.no_grad():
            linear.weight.copy_(weight_of(trial, layer, n_in, n_out, n_out, gain=gain, scale=scale))
            linear.bias.zero_()
        layers.append(linear)
    return nn.Sequential(*layers)


class OverChannels(nn.Module):
    """A normaliser of rows, at each position of an image."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(input.movedim(1, -1)).movedim(-1, 1)


def image_norm(method: str, shape: tuple[int, int, int]) -> nn.Module:
    """The normaliser of images (C, H, W), or nothing."""
    match method:
        case "batch-norm":
            return nn.BatchNorm2d(shape[0], affine=False)
        case "layer-norm-sample":
            return nn.LayerNorm(shape, elementwise_affine=False)
        case "rms-norm-sample":
            return nn.RMSNorm(shape, eps=torch.finfo(torch.float32).eps, elementwise_affine=False)
        case "layer-norm-position" | "rms-norm-position":
            return OverChannels(NORMS[method](shape[0]))
        case _:
            return nn.Identity()


def correction(method: str, numbers: int) -> tuple[str, float]:
    """The form of a correction, and its gain for patches or rows of that many numbers; another method as it is."""
    return method.removesuffix("-gain"), math.sqrt(numbers + 1) if method.endswith("-gain") else 1.0


def solo_conv_net(trial: Trial, shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Unflatten(1, shape)]
    channels, *side = shape
    areas = [size**2 for size, _ in kernels(trial.pattern, trial.depth)] + [1]
    for layer, (size, stride) in enumerate(kernels(trial.pattern, trial.depth)):
        numbers, edge = channels * size**2, layer == 0
        form, named = correction(trial.method, numbers)
        gain, scale = named * gain_of(trial, numbers, edge=edge), scale_of(trial, numbers, edge=edge)
        layers += [image_norm(trial.method, (channels, *side)), Times(scale if trial.method not in ("none", *LINEAR) else 1.0)]
        arguments = channels, trial.width, size, stride, size // 2
        conv = ad.nn.PatchNormConv2d(*arguments, form=form, gain=gain) if form in LINEAR else nn.Conv2d(*arguments)
        weight = weight_of(trial, layer, numbers, trial.width, trial.width * areas[layer + 1], gain=gain, scale=scale)
        conv = conv.double()
        with torch.no_grad():
            conv.weight.copy_(weight.view_as(conv.weight))
            conv.bias.zero_()
        layers += [conv, nn.Tanh() if trial.activation == "tanh" else nn.LeakyReLU(0.01)]
        channels, side = trial.width, [-(-length // stride) for length in side]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    form, named = correction(trial.method, channels)
    gain, scale = named * gain_of(trial, channels, edge=True), scale_of(trial, channels, edge=True)
    if trial.method in NORMS:
        layers += [NORMS[trial.method](channels), Times(scale)]
    head = (LINEAR[form](channels, classes, gain=gain) if form in LINEAR else nn.Linear(channels, classes)).double()
    with torch.no_grad():
        head.weight.copy_(weight_of(trial, trial.depth, channels, classes, classes, gain=gain, scale=scale))
        head.bias.zero_()
    return nn.Sequential(*layers, head)


def train_solo(trial: Trial, splits: Splits, steps: int) -> tuple[nn.Sequential, list[float]]:
    net = solo_conv_net(trial, splits.shape, splits.classes) if trial.pattern else solo_net(trial, math.prod(splits.shape), splits.classes)
    net = net.to(splits.train.inputs.dtype)
    return net, descended(net, trial, splits, steps)


def descended(net: nn.Sequential, trial: Trial, splits: Splits, steps: int) -> list[float]:
    """The losses of a net that is trained in place."""
    if trial.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=trial.learning_rate, weight_decay=trial.weight_decay)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=trial.learning_rate)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for batch in image_order(trial.seed, epoch, len(splits.train.inputs)).split(trial.batch_size)[: steps - len(losses)]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(splits.train.inputs[batch]), splits.train.labels[batch])
            loss.backward()
            for layer in net:
                if isinstance(layer, Corrected):
                    layer.correct()
            if trial.schedule == "linear":
                optimizer.param_groups[0]["lr"] = trial.learning_rate * (1.0 - len(losses) / steps)
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses
