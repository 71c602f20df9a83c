# The slow, obvious way to run a trial: torch's own modules, autograd and optim.SGD in a hand-written loop.
from __future__ import annotations

import itertools

import torch
from torch import nn

import affine_divergence as ad
from affine_divergence.lab.data import Splits
from affine_divergence.lab.training._seeds import image_order, initial_weight
from affine_divergence.lab.trial import Trial


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
LINEAR = {"norm-like": ad.nn.NormLikeLinear, "affine-like": ad.nn.AffineLikeLinear}


def solo_net(trial: Trial, features: int, classes: int) -> nn.Sequential:
    sizes = [features, *[trial.width] * trial.depth, classes]
    layers: list[nn.Module] = []
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if layer:
            layers.append(nn.Tanh() if trial.activation == "tanh" else nn.LeakyReLU(0.01))
        if trial.method in NORMS:
            layers.append(NORMS[trial.method](n_in))
        linear = LINEAR.get(trial.method, nn.Linear)(n_in, n_out)
        with torch.no_grad():
            linear.weight.copy_(initial_weight(trial.seed, layer, n_in, n_out).T)
            linear.bias.zero_()
        layers.append(linear)
    return nn.Sequential(*layers)


def train_solo(trial: Trial, splits: Splits, steps: int) -> tuple[nn.Sequential, list[float]]:
    net = solo_net(trial, splits.train.inputs.shape[1], splits.classes).to(splits.train.inputs.dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=trial.learning_rate)
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for batch in image_order(trial.seed, epoch, len(splits.train.inputs)).split(trial.batch_size)[: steps - len(losses)]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(splits.train.inputs[batch]), splits.train.labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return net, losses
