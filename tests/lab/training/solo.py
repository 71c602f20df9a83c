# The slow, obvious way to run a trial: torch's own modules, autograd and optim.SGD in a hand-written loop.
from __future__ import annotations

import itertools
import math

import torch
from torch import nn

import affine_divergence as ad
from affine_divergence.lab.data import Splits
from affine_divergence.lab.pattern import kernels
from affine_divergence.lab.training._seeds import image_order, initial_weight
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


def solo_net(trial: Trial, features: int, classes: int) -> nn.Sequential:
    sizes = [features, *[trial.width] * trial.depth, classes]
    layers: list[nn.Module] = []
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if layer:
            layers.append(nn.Tanh() if trial.activation == "tanh" else nn.LeakyReLU(0.01))
        if trial.method in NORMS:
            layers.append(NORMS[trial.method](n_in))
        linear = Corrected(n_in, n_out, trial) if trial.method in GRADIENT_ONLY else LINEAR.get(trial.method, nn.Linear)(n_in, n_out)
        with torch.no_grad():
            linear.weight.copy_(initial_weight(trial.seed, layer, n_in, n_out).T)
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
    for layer, (size, stride) in enumerate(kernels(trial.pattern, trial.depth)):
        layers.append(image_norm(trial.method, (channels, *side)))
        arguments = channels, trial.width, size, stride, size // 2
        form, gain = correction(trial.method, channels * size**2)
        conv = ad.nn.PatchNormConv2d(*arguments, form=form, gain=gain) if form in LINEAR else nn.Conv2d(*arguments)
        with torch.no_grad():
            conv.weight.copy_(initial_weight(trial.seed, layer, channels * size**2, trial.width).T.view_as(conv.weight))
            conv.bias.zero_()
        layers += [conv, nn.Tanh() if trial.activation == "tanh" else nn.LeakyReLU(0.01)]
        channels, side = trial.width, [-(-length // stride) for length in side]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if trial.method in NORMS:
        layers.append(NORMS[trial.method](channels))
    form, gain = correction(trial.method, channels)
    head = LINEAR[form](channels, classes, gain=gain) if form in LINEAR else nn.Linear(channels, classes)
    with torch.no_grad():
        head.weight.copy_(initial_weight(trial.seed, trial.depth, channels, classes).T)
        head.bias.zero_()
    return nn.Sequential(*layers, head)


def train_solo(trial: Trial, splits: Splits, steps: int) -> tuple[nn.Sequential, list[float]]:
    net = solo_conv_net(trial, splits.shape, splits.classes) if trial.pattern else solo_net(trial, math.prod(splits.shape), splits.classes)
    net = net.to(splits.train.inputs.dtype)
    return net, descended(net, trial, splits, steps)


def descended(net: nn.Sequential, trial: Trial, splits: Splits, steps: int) -> list[float]:
    """The losses of a net that is trained in place."""
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
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses
