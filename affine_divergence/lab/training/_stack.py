# A stack: the networks of many trials as one batched model, with its backward written out and its steps taken in place.
#
# Layout: K replicas in the trials' order, those of one method side by side. Hidden weights (K, n_in, n_out), biases (K, 1, n_out),
# activations (K, B, n). The first layer is wide: the images (B, d) are shared, so a method's replicas are one product
# with its (d, k·n) weight, which is most of the arithmetic for images.
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from affine_divergence.lab.training._methods import Plain, make_method
from affine_divergence.lab.training._seeds import initial_weight
from affine_divergence.lab.trial import Trial

LEAKY_SLOPE = 0.01


class Stack:
    """Fully-connected nets that differ in method and learning rate only; trials of one method must stand side by side."""

    def __init__(self, trials: Sequence[Trial], features: int, classes: int, dtype: torch.dtype = torch.float32) -> None:
        first = trials[0]
        self.tanh = first.activation == "tanh"
        sizes = [features, *[first.width] * first.depth, classes]
        methods = [(method, len(list(members))) for method, members in itertools.groupby(trials, key=lambda trial: trial.method)]
        self._counts = [count for _, count in methods]
        self._step_sizes = torch.tensor([-trial.learning_rate for trial in trials], dtype=dtype).view(-1, 1, 1)
        self._sites: list[list[Plain]] = [
            [make_method(method, (count,) if layer else (), sizes[layer], dtype) for method, count in methods]
            for layer in range(len(sizes) - 1)
        ]
        initial = [initial_weight(first.seed, layer, *sizes[layer : layer + 2]).to(dtype) for layer in range(len(sizes) - 1)]
        self.wide_weights = [initial[0].repeat(1, count) for count in self._counts]
        self.weights = [weight.repeat(len(trials), 1, 1) for weight in initial[1:]]
        self.biases = [torch.zeros(len(trials), 1, n, dtype=dtype) for n in sizes[1:]]

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of gradient descent on the mean cross-entropy; the losses (K,) before it."""
        logits = self._forward(images, training=True)
        log_probabilities = logits.log_softmax(-1)
        index = labels.expand(logits.shape[0], -1).unsqueeze(-1)
        losses = -log_probabilities.gather(-1, index).mean((1, 2))
        upstream = log_probabilities.exp_()
        upstream.scatter_add_(-1, index, upstream.new_full((1, 1, 1), -1.0).expand_as(index))
        self._backward(upstream.div_(len(labels)))
        return losses

    def predict(self, images: Tensor) -> Tensor:
        """Logits (K, B, classes), with BatchNorm's running statistics."""
        return self._forward(images, training=False)

    def _forward(self, images: Tensor, training: bool) -> Tensor:
        self._inputs: list[tuple[Tensor, ...]] = []  # of each layer: a tensor a method before the first, then one for all
        self._outputs: list[Tensor] = []
        z = self._first_layer(images, training)
        for layer, weight in enumerate(self.weights, start=1):
            a = z.tanh_() if self.tanh else torch.nn.functional.leaky_relu_(z, LEAKY_SLOPE)
            self._outputs.append(a)
            x = torch.empty_like(a)
            for site, part, target in zip(self._sites[layer], self._parts(a), self._parts(x), strict=True):
                target.copy_(site.enter(part, training))
            self._inputs.append((x,))
            z = torch.baddbmm(self.biases[layer], x, weight)
            for site, part in zip(self._sites[layer], self._parts(z), strict=True):
                _put(site.leave(part), part)
        return z

    def _first_layer(self, images: Tensor, training: bool) -> Tensor:
        z = images.new_empty(len(self._step_sizes), len(images), self.biases[0].shape[-1])
        inputs = []
        for site, weight, bias, part in zip(self._sites[0], self.wide_weights, self._parts(self.biases[0]), self._parts(z), strict=True):
            x = site.enter(images, training)
            inputs.append(x)
            y = (x @ weight).view(len(images), len(bias), -1).transpose(0, 1)
            part.copy_(site.leave(y + bias))
        self._inputs.append(tuple(inputs))
        return z

    def _backward(self, dz: Tensor) -> None:
        for layer in range(len(self.weights), 0, -1):
            weight, (x,) = self.weights[layer - 1], self._inputs[layer]
            for site, part in zip(self._sites[layer], self._parts(dz), strict=True):
                _put(site.leave_backward(part), part)
            da = torch.bmm(dz, weight.mT)
            change = dz.mul_(self._step_sizes)
            weight.baddbmm_(x.mT, change)
            self.biases[layer] += change.sum(1, keepdim=True)
            for site, part in zip(self._sites[layer], self._parts(da), strict=True):
                _put(site.enter_backward(part), part)
            a = self._outputs[layer - 1]
            dz = torch.ops.aten.tanh_backward(da, a) if self.tanh else torch.ops.aten.leaky_relu_backward(da, a, LEAKY_SLOPE, True)
        for site, part in zip(self._sites[0], self._parts(dz), strict=True):
            _put(site.leave_backward(part), part)
        change = dz.mul_(self._step_sizes)
        self.biases[0] += change.sum(1, keepdim=True)
        for weight, x, part in zip(self.wide_weights, self._inputs[0], self._parts(change), strict=True):
            weight.addmm_(x.mT, part.transpose(0, 1).reshape(len(x), -1))

    def _parts(self, replicas: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = replicas.split(self._counts)
        return parts


def _put(value: Tensor, place: Tensor) -> None:
    if value is not place:  # a method that changes nothing returns what it was given
        place.copy_(value)
