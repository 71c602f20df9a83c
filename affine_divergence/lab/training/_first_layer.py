# The first layer of a stack: the replicas that are given the same rows are one product with one wide weight.
#
# Layout: for each seed and each kind of input (the images, images less their mean, images normalised over the batch) a weight
# (k·n, d); one more for each gradient-only correction, and damping, whose update is by other rows than the images. Their products stand
# side by side in one (B, K·n) matrix, seed by seed, and are brought into the stack's order (K, B, n).
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from affine_divergence.lab.training._gradient_only import Foof, augmented, batch_factor, sample_rows
from affine_divergence.lab.training._methods import SCALED, BatchNorm
from affine_divergence.lab.training._starts import Layer, initial_of
from affine_divergence.lab.trial import GRADIENT_ONLY, Method, Trial


class Kind(NamedTuple):
    """What a group of replicas is given and stepped by."""

    method: Method  # batch-norm, layer-norm, a gradient-only correction, or none for all the others
    damping: float

    @staticmethod
    def of(trial: Trial) -> Kind:
        """A trial's."""
        known = trial.method in ("batch-norm", "layer-norm", *GRADIENT_ONLY)
        return Kind(trial.method if known else "none", trial.damping or 0.0)


class FirstLayer:
    """The weights between the images and the first hidden layer of every replica."""

    def __init__(self, trials: Sequence[Trial], layer: Layer, like: Tensor) -> None:
        self.width = layer.outputs
        self._norms: dict[tuple[int, Kind], BatchNorm] = {}
        self._foofs: dict[int, Foof] = {}
        for trial in trials:
            kind = Kind.of(trial)
            if kind.method == "batch-norm" and (trial.seed, kind) not in self._norms:
                self._norms[trial.seed, kind] = BatchNorm((), layer.fan_in, like)
        weights = [initial_of(trial, layer).T.to(like) for trial in trials]
        self._arrange(trials, weights)
        for number, own in self._corrected_by_seed.items():
            if dampings := [kind.damping for _, kind in own if kind.method == "foof"]:
                self._foofs[self.seeds[number]] = Foof(dampings)

    def _arrange(self, trials: Sequence[Trial], weights: Sequence[Tensor]) -> None:
        # Groups and their wide weights, from each replica's (n, d).
        device = weights[0].device
        self._trials = list(trials)
        self.seeds = sorted({trial.seed for trial in trials})
        self.seed_of_replica = torch.tensor([self.seeds.index(trial.seed) for trial in trials], device=device)
        self._place = sorted(range(len(trials)), key=lambda i: (trials[i].seed, Kind.of(trials[i]), i))
        self._groups: list[tuple[int, Kind, list[int]]] = []  # the seed's number, the kind, the replicas
        for (seed, kind), members in itertools.groupby(self._place, key=lambda i: (trials[i].seed, Kind.of(trials[i]))):
            self._groups.append((self.seeds.index(seed), kind, list(members)))
        self._weights = [torch.cat([weights[i] for i in members]) for _, _, members in self._groups]
        self._to_stack = torch.tensor([self._place.index(i) for i in range(len(trials))], device=device)
        self._to_columns = torch.tensor(self._place, device=device)
        group_of = {replica: group for group, (_, _, members) in enumerate(self._groups) for replica in members}
        scaled = [group_of[i] for i, trial in enumerate(trials) if trial.method in SCALED]
        self._squared = sorted(set(scaled))  # the groups whose rows' norms are wanted
        corrected = [group_of[i] for i, trial in enumerate(trials) if trial.method in GRADIENT_ONLY]
        self._corrected = sorted(set(corrected))
        self._corrected_of = torch.tensor([self._corrected.index(group) for group in corrected], dtype=torch.long, device=device)
        self._corrected_by_seed: dict[int, list[tuple[int, Kind]]] = {}
        for group in self._corrected:
            number, kind, _ = self._groups[group]
            self._corrected_by_seed.setdefault(number, []).append((group, kind))
        self._factors: dict[int, Tensor] = {}  # of the groups of the batch correction
        self._square_of = torch.tensor([self._squared.index(group) for group in scaled], dtype=torch.long, device=device)

    def keep(self, replicas: Sequence[int]) -> None:
        """Go on with some of the replicas, in this order."""
        foof = {seed: [kind.damping for _, kind in own if kind.method == "foof"] for seed, own in self._kinds_by_seed()}
        self._arrange([self._trials[i] for i in replicas], [self.rows_of(i) for i in replicas])
        left = {seed: [kind.damping for _, kind in own if kind.method == "foof"] for seed, own in self._kinds_by_seed()}
        self._foofs = {seed: one.keep([foof[seed].index(d) for d in left[seed]]) for seed, one in self._foofs.items() if left.get(seed)}

    def _kinds_by_seed(self) -> list[tuple[int, list[tuple[int, Kind]]]]:
        return [(self.seeds[number], own) for number, own in self._corrected_by_seed.items()]

    def weight(self, replica: int) -> Tensor:
        """A replica's (d, n) weight."""
        return self.rows_of(replica).T

    def rows_of(self, replica: int) -> Tensor:
        """The same as it lies in memory, (n, d)."""
        for (_, _, members), weight in zip(self._groups, self._weights, strict=True):
            if replica in members:
                start = members.index(replica) * self.width
                return weight[start : start + self.width]
        raise IndexError(f"there is no replica {replica}")

    def forward(self, images: Sequence[Tensor], bias: Tensor, training: bool) -> tuple[Tensor, Tensor | None]:
        """Product plus bias (K, B, n), and ‖x‖² (K', B, 1) of the replicas whose rows are scaled, from each seed's images (B, d)."""
        rows = len(images[0])
        wide = images[0].new_empty(rows, len(bias) * self.width)
        self._inputs = []
        start = 0
        for (number, kind, _), weight in zip(self._groups, self._weights, strict=True):
            x = images[number]
            if kind.method == "batch-norm":
                x = self._norms[self.seeds[number], kind].normalise_(x.clone(), training)
            elif kind.method == "layer-norm":
                x = x - x.mean(-1, keepdim=True)
            self._inputs.append(x)
            torch.mm(x, weight.mT, out=wide[:, start : start + len(weight)])
            start += len(weight)
        product = wide.view(rows, -1, self.width).transpose(0, 1).index_select(0, self._to_stack)
        squares = [self._inputs[group].square().sum(-1, keepdim=True) for group in self._squared]
        return product.add_(bias), torch.stack(squares).index_select(0, self._square_of) if squares else None

    def correct(self) -> Tensor:
        """Make what the gradient-only corrections step by, and return what their biases do, (K', 1, B), a number a row."""
        biases: dict[int, Tensor] = {}
        self._factors = {}
        for number, groups in self._corrected_by_seed.items():
            images = augmented(self._inputs[groups[0][0]]).unsqueeze(0)
            of_foof = iter(self._foofs[self.seeds[number]](images) if self.seeds[number] in self._foofs else ())
            for group, kind in groups:
                if kind.method == "batch":
                    # Images have far more numbers than a layer, so (X̃X̃ᵀ + λ)⁻¹ is applied to the change, not to them.
                    (self._factors[group],) = batch_factor(images, kind.damping)
                    (biases[group],) = torch.cholesky_solve(images[0, :, -1:], self._factors[group]).mT
                else:
                    (rows,) = sample_rows(images) if kind.method == "sample" else next(of_foof)
                    self._inputs[group], biases[group] = rows[:, :-1], rows[:, -1]
        return torch.stack([biases[group] for group in self._corrected]).index_select(0, self._corrected_of).unsqueeze(1)

    def update(self, change: Tensor) -> None:
        """Add to each weight the product of its rows with a change (K, B, n) of what it gave."""
        for weight, x, own in self._by_group(change):
            weight.addmm_(own.mT, x)

    def gradients(self, change: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each replica with its weight (n, d) and the product of its rows with a change (K, B, n) of what it gave."""
        for (_, _, members), (weight, x, own) in zip(self._groups, self._by_group(change), strict=True):
            gradient = weight.new_empty(self.width, x.shape[1])  # one replica's at a time, which stays in the cache
            for place, replica in enumerate(members):
                part = slice(place * self.width, (place + 1) * self.width)
                torch.mm(own[:, part].mT, x, out=gradient)
                yield replica, weight[part], gradient

    def _by_group(self, change: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        wide = change.transpose(0, 1).index_select(1, self._to_columns).view(change.shape[1], -1)
        start = 0
        for group, (weight, x) in enumerate(zip(self._weights, self._inputs, strict=True)):
            own = wide[:, start : start + len(weight)]
            yield weight, x, torch.cholesky_solve(own, self._factors[group]) if group in self._factors else own
            start += len(weight)
