# A stack of convolutional nets: replicas of one method as one net of grouped convolutions, with autograd.
#
# Layout: K replicas of one method, ordered by seed. Activations (B, K·C, H, W), channels last; weights (K·C_out, C_in, k, k), a group a
# replica, so that what a method does by group it does by replica. Images stand side by side (B, S·C, H, W), one of each of the S seeds
# where these have equally many replicas, else one of each replica. Zero padding by half of the kernel; after the last activation the
# mean over positions, and an affine layer.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_divergence.lab.pattern import Kernel, kernels
from affine_divergence.lab.training._adamw import AdamW
from affine_divergence.lab.training._conv_methods import METHODS, BatchNorm
from affine_divergence.lab.training._methods import LEAKY_SLOPE
from affine_divergence.lab.training._starts import initial_of, layers_of, rate_factors, scales_of
from affine_divergence.lab.trial import Trial

NUMBERS_AT_ONCE = 1 << 22  # in an activation when nets are evaluated: 16 MB


class ConvStack:
    """Convolutional nets that differ in start, gain, learning rate and seed only, in the order of `sort_key`."""

    def __init__(self, trials: Sequence[Trial], shape: tuple[int, int, int], classes: int, like: Tensor) -> None:
        first = trials[0]
        assert first.pattern is not None
        if list(trials) != sorted(trials, key=sort_key):
            raise ValueError("the trials of a stack stand in the order of sort_key")
        self.shape, self.tanh = shape, first.activation == "tanh"
        self.kernels = kernels(first.pattern, first.depth)
        layers = self._layers = layers_of(first, shape, classes)
        self._arrange(trials, like)
        channels = [shape[0], *[first.width] * first.depth]
        make = METHODS[first.method]
        self._convolutions = [make.images(g, c, like) for g, c in zip(self._groups, channels, strict=False)]
        self._head = make.rows(self.count, first.width, like)
        weights = [torch.stack([initial_of(trial, layer).to(like) for trial in trials]) for layer in layers]
        for place, (c_in, kernel) in enumerate(zip(channels, self.kernels, strict=False)):
            weights[place] = weights[place].mT.reshape(-1, c_in, kernel.size, kernel.size).contiguous()
        self.weights = [weight.requires_grad_() for weight in weights]
        biases = [like.new_zeros(self.count * first.width) for _ in self.kernels] + [like.new_zeros(self.count, 1, classes)]
        self.biases = [bias.requires_grad_() for bias in biases]
        self._adamw = None
        if first.optimizer == "adamw":
            scales = [[scales_of(trial, layer) for trial in trials] for layer in layers]
            of_parameters = [[one[i] for one in of_layer] for i in range(2) for of_layer in scales]
            self._adamw = AdamW(trials, self._flat_parameters, of_parameters)

    def _arrange(self, trials: Sequence[Trial], like: Tensor) -> None:
        # All that follows from the trials alone.
        self._trials, self.count = list(trials), len(trials)
        replicas = Counter(trial.seed for trial in trials)
        self.seeds = list(replicas)
        self.seed_of_replica = torch.tensor([self.seeds.index(trial.seed) for trial in trials], device=like.device)
        equal = len(set(replicas.values())) == 1
        self._sources = list(range(len(self.seeds))) if equal else self.seed_of_replica.tolist()
        self._groups = [len(self._sources), *[self.count] * (trials[0].depth - 1)]
        self._rates = torch.tensor([-trial.learning_rate for trial in trials], dtype=torch.float64).to(like).unsqueeze(-1)
        factors = [rate_factors(trials, layer, like) for layer in self._layers]
        self._factors = [factor.weight for factor in factors] + [factor.bias for factor in factors]
        side = _largest(self.shape[1:], self.kernels)
        self.rows = max(1, NUMBERS_AT_ONCE // (self.count * trials[0].width * side))

    def keep(self, replicas: Sequence[int]) -> None:
        """Go on with some of the replicas only, in the order in which they stand."""
        index = torch.tensor(replicas, device=self._rates.device)
        images_of = self._image_of_replica()
        self.weights, self.biases = (
            [one.detach().view(self.count, -1)[index].view(-1, *one.shape[1:]).requires_grad_() for one in parameters]
            for parameters in (self.weights, self.biases)
        )
        self._arrange([self._trials[i] for i in replicas], self._rates)
        first_of = {image: place for place, image in reversed(list(enumerate(self._image_of_replica())))}
        of_images = torch.tensor([images_of[replicas[first_of[image]]] for image in range(self._groups[0])], device=index.device)
        for place, one in enumerate([*self._convolutions, self._head]):
            if isinstance(one, BatchNorm):
                one.keep(index if place else of_images)
        if self._adamw is not None:
            self._adamw.keep(replicas, self._flat_parameters)

    def _image_of_replica(self) -> list[int]:
        # Which of the images that stand side by side each replica is given.
        shared: list[int] = self.seed_of_replica.tolist()
        return shared if len(self._sources) == len(self.seeds) else list(range(self.count))

    @property
    def _parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    @property
    def _flat_parameters(self) -> list[Tensor]:
        return [parameter.detach().view(self.count, -1) for parameter in self._parameters]

    def step(self, images: Sequence[Tensor], labels: Tensor, pace: float = 1.0) -> Tensor:
        """One step on the mean cross-entropy, at `pace` times the learning rates; the losses (K,) before it.

        Images (B, d) and a row of labels a seed.
        """
        logits = self._forward(images, training=True)
        index = labels[self.seed_of_replica]
        losses = F.cross_entropy(logits.flatten(0, 1), index.flatten(), reduction="none").view(index.shape).mean(1)
        gradients = torch.autograd.grad(losses.sum(), self._parameters)
        with torch.no_grad():
            flat = [gradient.reshape(self.count, -1) for gradient in gradients]
            if self._adamw is not None:
                for buffer, gradient in zip(self._adamw.gradients, flat, strict=True):
                    buffer.copy_(gradient)
                self._adamw.step(pace)
            else:
                for parameter, gradient, factor in zip(self._parameters, flat, self._factors, strict=True):
                    rates = self._rates * pace if factor is None else self._rates * (factor.view(-1, 1) * pace)
                    parameter.view(self.count, -1).addcmul_(gradient, rates)
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
