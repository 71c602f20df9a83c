# The first layer of a stack: the replicas that are given the same rows are one product with one wide weight.
#
# Layout: for each seed and each kind of input (the images, images less their mean, images normalised over the batch) a weight
# (d, k·n). Their products stand side by side in one (B, K·n) matrix, seed by seed, and are brought into the stack's order (K, B, n).
from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from affine_divergence.lab.training._methods import SCALED, BatchNorm
from affine_divergence.lab.training._seeds import initial_weight
from affine_divergence.lab.trial import Method, Trial

KINDS: dict[Method, str] = {"batch-norm": "normed", "layer-norm": "centred"}  # of the rest: "images"


class FirstLayer:
    """The weights between the images and the first hidden layer of every replica."""

    def __init__(self, trials: Sequence[Trial], features: int, width: int, like: Tensor) -> None:
        seeds = sorted({trial.seed for trial in trials})
        self.seeds, self.width = seeds, width
        self.seed_of_replica = torch.tensor([seeds.index(trial.seed) for trial in trials], device=like.device)
        place = sorted(range(len(trials)), key=lambda i: (trials[i].seed, KINDS.get(trials[i].method, "images"), i))
        self._groups: list[tuple[int, str, list[int]]] = []  # the seed's number, the kind, the replicas
        for (seed, kind), members in itertools.groupby(place, key=lambda i: (trials[i].seed, KINDS.get(trials[i].method, "images"))):
            self._groups.append((seeds.index(seed), kind, list(members)))
        initial = {seed: initial_weight(seed, 0, features, width).to(like) for seed in seeds}
        self._weights = [initial[seeds[number]].repeat(1, len(members)) for number, _, members in self._groups]
        self._norms = [BatchNorm((), features, like) if kind == "normed" else None for _, kind, _ in self._groups]
        self._to_stack = torch.tensor([place.index(i) for i in range(len(trials))], device=like.device)
        self._to_columns = torch.tensor(place, device=like.device)
        group_of = {replica: group for group, (_, _, members) in enumerate(self._groups) for replica in members}
        scaled = [group_of[i] for i, trial in enumerate(trials) if trial.method in SCALED]
        self._squared = sorted(set(scaled))  # the groups whose rows' norms are wanted
        self._square_of = torch.tensor([self._squared.index(group) for group in scaled], dtype=torch.long, device=like.device)

    def weight(self, replica: int) -> Tensor:
        """A replica's (d, n) weight."""
        for (_, _, members), weight in zip(self._groups, self._weights, strict=True):
            if replica in members:
                start = members.index(replica) * self.width
                return weight[:, start : start + self.width]
        raise IndexError(f"there is no replica {replica}")

    def forward(self, images: Sequence[Tensor], bias: Tensor, training: bool) -> tuple[Tensor, Tensor | None]:
        """Product plus bias (K, B, n), and ‖x‖² (K', B, 1) of the replicas whose rows are scaled, from each seed's images (B, d)."""
        rows = len(images[0])
        wide = images[0].new_empty(rows, len(bias) * self.width)
        self._inputs = []
        start = 0
        for (number, kind, _), weight, norm in zip(self._groups, self._weights, self._norms, strict=True):
            x = images[number]
            if norm is not None:
                x = norm.normalise_(x.clone(), training)
            elif kind == "centred":
                x = x - x.mean(-1, keepdim=True)
            self._inputs.append(x)
            torch.mm(x, weight, out=wide[:, start : start + weight.shape[1]])
            start += weight.shape[1]
        product = wide.view(rows, -1, self.width).transpose(0, 1).index_select(0, self._to_stack)
        squares = [self._inputs[group].square().sum(-1, keepdim=True) for group in self._squared]
        return product.add_(bias), torch.stack(squares).index_select(0, self._square_of) if squares else None

    def update(self, change: Tensor) -> None:
        """Add to each weight the product of its inputs with a change (K, B, n) of what it gave."""
        wide = change.transpose(0, 1).index_select(1, self._to_columns).view(change.shape[1], -1)
        start = 0
        for weight, x in zip(self._weights, self._inputs, strict=True):
            weight.addmm_(x.mT, wide[:, start : start + weight.shape[1]])
            start += weight.shape[1]
