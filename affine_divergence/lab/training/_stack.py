# A stack: the networks of many trials as one batched model, with its backward written out and its steps taken in place.
#
# Layout: K replicas ordered by method as _methods.ORDER says. Hidden weights (K, n_in, n_out), biases (K, 1, n_out),
# activations (K, B, n). The first layer is wide: replicas of one seed share the images (B, d), so they are one product with a
# (d, k·n) weight, which is most of the arithmetic. The gradients of the logits are multiplied by −learning rate at once: all that
# follows is linear in them, so weights are updated by one product in place.
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from affine_divergence.lab.training._adamw import AdamW, OneByOne
from affine_divergence.lab.training._first_layer import FirstLayer
from affine_divergence.lab.training._gradient_only import Corrections, augmented
from affine_divergence.lab.training._methods import LEAKY_SLOPE, ORDER, SCALED, BatchNorm, RowScale
from affine_divergence.lab.training._starts import initial_of, layers_of, rate_factors, scales_of
from affine_divergence.lab.trial import GRADIENT_ONLY, Trial

ROWS_AT_ONCE = 1000  # when nets are evaluated


class Stack:
    """Fully-connected nets that differ in method, start, gain, learning rate, damping and seed only, in the order of `sort_key`."""

    def __init__(self, trials: Sequence[Trial], shape: tuple[int, int, int], classes: int, like: Tensor) -> None:
        first = trials[0]
        self.tanh, self.rows = first.activation == "tanh", ROWS_AT_ONCE
        self._layers = layers_of(first, shape, classes)
        self.first = FirstLayer(trials, self._layers[0], like)
        self.weights = [torch.stack([initial_of(trial, layer).to(like) for trial in trials]) for layer in self._layers[1:]]
        self.biases = [like.new_zeros(len(trials), 1, layer.outputs) for layer in self._layers]
        self._arrange(trials, like)
        self._corrections = [Corrections(trials[self._corrected], like) for _ in self.weights]
        self._batch_norms = [BatchNorm((_length(self._normed),), layer.fan_in, like) for layer in self._layers[1:]]
        self._adamw = self._make_adamw() if first.optimizer == "adamw" else None

    def _arrange(self, trials: Sequence[Trial], like: Tensor) -> None:
        # All that follows from the trials alone.
        self._trials, self.count, self.seeds = list(trials), len(trials), self.first.seeds
        spans = _spans(trials)
        self._normed, self._affine, self._centred = spans["batch-norm"], spans["affine-like"], spans["layer-norm"]
        self._scaled = slice(spans[SCALED[0]].start, len(trials))
        self._corrected = slice(spans[GRADIENT_ONLY[0]].start, spans[GRADIENT_ONLY[-1]].stop)
        self._has_scaled = _length(self._scaled) > 0
        scaled = [trial.method for trial in trials[self._scaled]]
        self._scales = [RowScale(scaled, layer.fan_in, like) for layer in self._layers]
        # Where the layer adds its bias: inside the scale (affine-like) or outside of it.
        inside = [trial.method not in SCALED or trial.method == "affine-like" for trial in trials]
        self._inside = torch.tensor(inside).to(like).view(-1, 1, 1)
        self._outside = 1.0 - self._inside[self._scaled]
        self._rates = torch.tensor([-trial.learning_rate for trial in trials], dtype=torch.float64).to(like).view(-1, 1, 1)
        self._factors = [rate_factors(trials, layer, like) for layer in self._layers]

    def _make_adamw(self) -> tuple[OneByOne, AdamW]:
        scales = [[scales_of(trial, layer) for trial in self._trials] for layer in self._layers]
        first = [self.first.rows_of(replica) for replica in range(self.count)]
        of_weights, of_biases = ([[one[i] for one in of_layer] for of_layer in scales] for i in range(2))
        return (
            OneByOne(self._trials, first, of_weights[0]),
            AdamW(self._trials, [*self.weights, *self.biases], [*of_weights[1:], *of_biases]),
        )

    def keep(self, replicas: Sequence[int]) -> None:
        """Go on with some of the replicas only, in the order in which they stand."""
        index = torch.tensor(replicas, device=self._rates.device)
        parts: tuple[tuple[Sequence[BatchNorm | Corrections], slice], ...]
        parts = (self._batch_norms, self._normed), (self._corrections, self._corrected)
        for part, span in parts:
            places = [i - span.start for i in replicas if span.start <= i < span.stop]
            for one in part:
                one.keep(torch.tensor(places, dtype=torch.long, device=index.device))
        self.first.keep(replicas)
        self.weights = [weight[index] for weight in self.weights]
        self.biases = [bias[index] for bias in self.biases]
        if self._adamw is not None:
            self._adamw[0].keep(replicas)
            self._adamw[1].keep(replicas, [*self.weights, *self.biases])
        self._arrange([self._trials[i] for i in replicas], self._rates)

    def step(self, images: Sequence[Tensor], labels: Tensor, pace: float = 1.0) -> Tensor:
        """One step on the mean cross-entropy, at `pace` times the learning rates; the losses (K,) before it.

        Images (B, d) and a row of labels a seed.
        """
        logits = self._forward(images, training=True)
        # log_softmax itself takes four times as long over so few classes.
        log_probabilities = logits.sub_(logits.logsumexp(-1, keepdim=True))
        index = labels[self.first.seed_of_replica].unsqueeze(-1)
        losses = -log_probabilities.gather(-1, index).mean((1, 2))
        upstream = log_probabilities.exp_()
        upstream.scatter_add_(-1, index, upstream.new_full((1, 1, 1), -1.0).expand_as(index))
        if self._adamw is None:
            self._backward(upstream.mul_(self._rates * (pace / labels.shape[1])))
            return losses
        self._backward(upstream.div_(labels.shape[1]))
        first, others = self._adamw
        first.begin()
        for replica, weight, gradient in self.first.gradients(self._first_change):
            first.update(replica, weight, gradient, pace)
        others.step(pace)
        return losses

    def predict(self, images: Tensor) -> Tensor:
        """Logits (K, B, classes) of one batch for all, with BatchNorm's running statistics."""
        return self._forward([images] * len(self.seeds), training=False)

    def _forward(self, images: Sequence[Tensor], training: bool) -> Tensor:
        self._inputs: list[Tensor | None] = [None]
        self._activations: list[Tensor] = []
        self._scaling: list[tuple[Tensor, Tensor]] = []  # of each layer, of the scaled replicas: the product before its scale, the scale
        z, square = self.first.forward(images, self._bias_inside(0), training)
        self._scale_(0, z, square)
        for layer, weight in enumerate(self.weights, start=1):
            a = z.tanh_() if self.tanh else torch.nn.functional.leaky_relu_(z, LEAKY_SLOPE)
            self._activations.append(a)
            x = self._enter(layer, a, training)
            self._inputs.append(x)
            z = torch.baddbmm(self._bias_inside(layer), x, weight)
            self._scale_(layer, z, x[self._scaled].square().sum(-1, keepdim=True) if self._has_scaled else None)
        return z

    def _enter(self, layer: int, a: Tensor, training: bool) -> Tensor:
        # What the layer is given: a, or a copy of it where a replica's method changes it.
        if not (_length(self._normed) or _length(self._centred)):
            return a
        x = a.clone()
        if _length(self._normed):
            self._batch_norms[layer - 1].normalise_(x[self._normed], training)
        if _length(self._centred):
            centred = x[self._centred]
            centred -= centred.mean(-1, keepdim=True)
        return x

    def _enter_backward_(self, layer: int, dx: Tensor) -> None:
        if _length(self._normed):
            self._batch_norms[layer - 1].backward_(dx[self._normed])
        if _length(self._centred):
            centred = dx[self._centred]
            centred -= centred.mean(-1, keepdim=True)

    def _bias_inside(self, layer: int) -> Tensor:
        return self.biases[layer] * self._inside if self._has_scaled else self.biases[layer]

    def _scale_(self, layer: int, product: Tensor, square: Tensor | None) -> None:
        # Makes z of the product, in its place.
        if square is None:
            return
        s, scaled = self._scales[layer].scale(square), product[self._scaled]
        before = scaled.clone()
        torch.addcmul(self.biases[layer][self._scaled] * self._outside, before, s, out=scaled)
        self._scaling.append((before, s))

    def _backward(self, dz: Tensor) -> None:
        for layer in range(len(self.weights), 0, -1):
            weight, x = self.weights[layer - 1], self._inputs[layer]
            assert x is not None
            rows, ones = self._correct(layer, x)
            radial = self._leave_backward_(layer, dz, ones)
            dx = torch.bmm(dz, weight.mT)
            self._update(layer - 1, weight, rows, dz, self._factors[layer].weight)
            if radial is not None:
                dx[self._scaled].addcmul_(x[self._scaled], radial)
            self._enter_backward_(layer, dx)
            a = self._activations[layer - 1]
            dz = torch.ops.aten.tanh_backward(dx, a) if self.tanh else torch.ops.aten.leaky_relu_backward(dx, a, LEAKY_SLOPE, True)
        ones = dz.new_ones(len(dz), 1, dz.shape[1])
        if _length(self._corrected):
            ones[self._corrected] = self.first.correct()
        self._leave_backward_(0, dz, ones)
        if self._adamw is None:
            self.first.update(dz if self._factors[0].weight is None else dz * self._factors[0].weight)
        else:
            self._first_change = dz

    def _update(self, number: int, parameter: Tensor, rows: Tensor, dz: Tensor, factor: Tensor | None) -> None:
        # Steps weights (K, n_in, n_out), or biases (K, 1, n_out), by rowsᵀ dz; AdamW steps all of them at the end.
        if self._adamw is None:
            parameter.baddbmm_(rows.mT, dz if factor is None else dz * factor)
        else:
            torch.bmm(rows.mT, dz, out=self._adamw[1].gradients[number])

    def _correct(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        # The rows that the weights step by, and the numbers that the biases do: x and ones but for the gradient-only corrections.
        ones = x.new_ones(len(x), 1, x.shape[1])
        if not _length(self._corrected):
            return x, ones
        rows, corrected = x.clone(), self._corrections[layer - 1](augmented(x[self._corrected]))
        rows[self._corrected] = corrected[..., :-1]
        ones[self._corrected] = corrected[..., -1].unsqueeze(1)
        return rows, ones

    def _leave_backward_(self, layer: int, dz: Tensor, ones: Tensor) -> Tensor | None:
        # Updates the bias and turns dz into the gradient of the product, in its place; returns what multiplies each scaled row of x in dx.
        number, factor = len(self.weights) + layer, self._factors[layer].bias
        if not self._has_scaled:
            self._update(number, self.biases[layer], ones.mT, dz, factor)
            return None
        (before, s), start = self._scaling[layer], self._scaled.start
        if _length(self._affine):
            ones[self._affine] = s[self._affine.start - start : self._affine.stop - start].mT
        self._update(number, self.biases[layer], ones.mT, dz, factor)
        scaled = dz[self._scaled]
        radial = (scaled * before).sum(-1, keepdim=True).mul_(self._scales[layer].curvature(s)) if layer else None
        scaled *= s
        return radial


def sort_key(trial: Trial) -> tuple[int, int, float]:
    """The order of the replicas of a stack."""
    return ORDER.index(trial.method), trial.seed, trial.learning_rate


def _spans(trials: Sequence[Trial]) -> dict[str, slice]:
    # The replicas of each method; where there are none, an empty slice where they would stand.
    counts = [sum(trial.method == method for trial in trials) for method in ORDER]
    ends = list(itertools.accumulate(counts))
    if [trial.method for trial in trials] != sorted((trial.method for trial in trials), key=ORDER.index):
        raise ValueError("the trials of a stack stand in the order of sort_key")
    return {method: slice(end - count, end) for method, count, end in zip(ORDER, counts, ends, strict=True)}


def _length(span: slice) -> int:
    return int(span.stop - span.start)
