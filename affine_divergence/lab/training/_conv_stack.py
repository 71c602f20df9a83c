# A stack of convolutional nets: replicas of one method as one net of grouped convolutions, with autograd.
#
# Layout: K replicas of one method, ordered by seed. Activations (B, K·C, H, W), channels last; weights (K·C_out, C_in, k, k), a group a
# replica, so that what a method does by group it does by replica. Images stand side by side (B, S·C, H, W), one of each of the S seeds
# where these have equally many replicas, else one of each replica. Zero padding by half of the kernel; after the last activation the
# mean over positions, and an affine layer.
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_divergence.lab.pattern import Kernel, kernels
from affine_divergence.lab.training._conv_methods import METHODS
from affine_divergence.lab.training._methods import LEAKY_SLOPE
from affine_divergence.lab.training._seeds import initial_weight
from affine_divergence.lab.trial import Trial

NUMBERS_AT_ONCE = 1 << 22  # in an activation when nets are evaluated: 16 MB


class ConvStack:
    """Convolutional nets that differ in learning rate and seed only, in the order of `sort_key`."""

    def __init__(self, trials: Sequence[Trial], shape: tuple[int, int, int], classes: int, like: Tensor) -> None:
        first = trials[0]
        assert first.pattern is not None
        if list(trials) != sorted(trials, key=sort_key):
            raise ValueError("the trials of a stack stand in the order of sort_key")
        self.count, self.shape, self.tanh = len(trials), shape, first.activation == "tanh"
        self.kernels = kernels(first.pattern, first.depth)
        replicas = Counter(trial.seed for trial in trials)
        self.seeds = list(replicas)
        self.seed_of_replica = torch.tensor([self.seeds.index(trial.seed) for trial in trials], device=like.device)
        equal = len(set(replicas.values())) == 1
        self._sources = list(range(len(self.seeds))) if equal else self.seed_of_replica.tolist()
        self._rates = torch.tensor([-trial.learning_rate for trial in trials], dtype=torch.float64).to(like).unsqueeze(-1)
        channels = [shape[0], *[first.width] * first.depth]
        groups = [len(self._sources), *[self.count] * (first.depth - 1)]
        make = METHODS[first.method]
        self._convolutions = [make.images(g, c, like) for g, c in zip(groups, channels, strict=False)]
        self._head = make.rows(self.count, first.width, like)
        self._groups = groups
        weights = []
        for layer, ((c_in, c_out), kernel) in enumerate(zip(itertools.pairwise(channels), self.kernels, strict=True)):
            drawn = [initial_weight(trial.seed, layer, c_in * kernel.size**2, c_out).T for trial in trials]
            weights.append(torch.stack(drawn).view(-1, c_in, kernel.size, kernel.size))
        weights.append(torch.stack([initial_weight(trial.seed, first.depth, first.width, classes) for trial in trials]))
        self.weights = [weight.to(like).requires_grad_() for weight in weights]
        biases = [like.new_zeros(self.count * first.width) for _ in self.kernels] + [like.new_zeros(self.count, 1, classes)]
        self.biases = [bias.requires_grad_() for bias in biases]
        side = _largest(shape[1:], self.kernels)
        self.rows = max(1, NUMBERS_AT_ONCE // (self.count * first.width * side))

    def step(self, images: Sequence[Tensor], labels: Tensor) -> Tensor:
        """One step of gradient descent on the mean cross-entropy; the losses (K,) before it. Images (B, d) and a row of labels a seed."""
        logits = self._forward(images, training=True)
        index = labels[self.seed_of_replica]
        losses = F.cross_entropy(logits.flatten(0, 1), index.flatten(), reduction="none").view(index.shape).mean(1)
        parameters = [*self.weights, *self.biases]
        gradients = torch.autograd.grad(losses.sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.view(self.count, -1).addcmul_(gradient.reshape(self.count, -1), self._rates)
        return losses.detach()

    def predict(self, images: Tensor) -> Tensor:
        """Logits (K, B, classes) of one batch for all, with BatchNorm's running statistics."""
        with torch.no_grad():
            return self._forward([images] * len(self.seeds), training=False)

    def _forward(self, images: Sequence[Tensor], training: bool) -> Tensor:
        side_by_side = torch.stack([images[source] for source in self._sources], 1)
        a = side_by_side.view(len(side_by_side), -1, *self.shape[1:]).contiguous(memory_format=torch.channels_last)
        for layer, (kernel, convolve) in enumerate(zip(self.kernels, self._convolutions, strict=True)):
            z = convolve(a, self.weights[layer], self.biases[layer], kernel, self._groups[layer], training)
            a = torch.tanh(z) if self.tanh else F.leaky_relu(z, LEAKY_SLOPE)
        pooled = a.mean((2, 3)).view(len(a), self.count, -1).transpose(0, 1)
        return self._head(pooled, self.weights[-1], self.biases[-1], training)


def sort_key(trial: Trial) -> tuple[int, float]:
    """The order of the replicas of a stack."""
    return trial.seed, trial.learning_rate


def _largest(side: tuple[int, ...], layers: Sequence[Kernel]) -> int:
    # The positions of the largest activation: that of the first convolution.
    height, width = (-(-length // layers[0].stride) for length in side)
    return height * width
