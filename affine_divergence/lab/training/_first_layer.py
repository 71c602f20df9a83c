# The first layer of a stack: the replicas that are given the same rows are one product with one wide weight.
#
# Layout: for each seed and each kind of input (the images, images less their mean, images normalised over the batch) a weight
# (d, k·n); one more for each gradient-only correction, and damping, whose update is by other rows than the images. Their products stand
# side by side in one (B, K·n) matrix, seed by seed, and are brought into the stack's order (K, B, n).
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from affine_divergence.lab.training._gradient_only import Foof, augmented, batch_factor, sample_rows
from affine_divergence.lab.training._methods import SCALED, BatchNorm
from affine_divergence.lab.training._seeds import initial_weight
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

    def __init__(self, trials: Sequence[Trial], features: int, width: int, like: Tensor) -> None:
        seeds = sorted({trial.seed for trial in trials})
        self.seeds, self.width = seeds, width
        self.seed_of_replica = torch.tensor([seeds.index(trial.seed) for trial in trials], device=like.device)
        place = sorted(range(len(trials)), key=lambda i: (trials[i].seed, Kind.of(trials[i]), i))
        self._groups: list[tuple[int, Kind, list[int]]] = []  # the seed's number, the kind, the replicas
        for (seed, kind), members in itertools.groupby(place, key=lambda i: (trials[i].seed, Kind.of(trials[i]))):
            self._groups.append((seeds.index(seed), kind, list(members)))
        initial = {seed: initial_weight(seed, 0, features, width).to(like) for seed in seeds}
        self._weights = [initial[seeds[number]].repeat(1, len(members)) for number, _, members in self._groups]
        self._norms = [BatchNorm((), features, like) if kind.method == "batch-norm" else None for _, kind, _ in self._groups]
        self._to_stack = torch.tensor([place.index(i) for i in range(len(trials))], device=like.device)
        self._to_columns = torch.tensor(place, device=like.device)
        group_of = {replica: group for group, (_, _, members) in enumerate(self._groups) for replica in members}
        scaled = [group_of[i] for i, trial in enumerate(trials) if trial.method in SCALED]
        self._squared = sorted(set(scaled))  # the groups whose rows' norms are wanted
        corrected = [group_of[i] for i, trial in enumerate(trials) if trial.method in GRADIENT_ONLY]
        self._corrected = sorted(set(corrected))
        self._corrected_of = torch.tensor([self._corrected.index(group) for group in corrected], dtype=torch.long, device=like.device)
        self._corrected_by_seed: dict[int, list[tuple[int, Kind]]] = {}
        for group in self._corrected:
            number, kind, _ = self._groups[group]
            self._corrected_by_seed.setdefault(number, []).append((group, kind))
        dampings = {number: [kind.damping for _, kind in own if kind.method == "foof"] for number, own in self._corrected_by_seed.items()}
        self._foofs = {number: Foof(own) for number, own in dampings.items() if own}
        self._factors: dict[int, Tensor] = {}  # of the groups of the batch correction
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
            elif kind.method == "layer-norm":
                x = x - x.mean(-1, keepdim=True)
            self._inputs.append(x)
            torch.mm(x, weight, out=wide[:, start : start + weight.shape[1]])
            start += weight.shape[1]
        product = wide.view(rows, -1, self.width).transpose(0, 1).index_select(0, self._to_stack)
        squares = [self._inputs[group].square().sum(-1, keepdim=True) for group in self._squared]
        return product.add_(bias), torch.stack(squares).index_select(0, self._square_of) if squares else None

    def correct(self) -> Tensor:
        """Make what the gradient-only corrections step by, and return what their biases do, (K', 1, B), a number a row."""
        biases: dict[int, Tensor] = {}
        self._factors = {}
        for number, groups in self._corrected_by_seed.items():
            images = augmented(self._inputs[groups[0][0]]).unsqueeze(0)
            of_foof = iter(self._foofs[number](images) if number in self._foofs else ())
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
        wide = change.transpose(0, 1).index_select(1, self._to_columns).view(change.shape[1], -1)
        start = 0
        for group, (weight, x) in enumerate(zip(self._weights, self._inputs, strict=True)):
            own = wide[:, start : start + weight.shape[1]]
            weight.addmm_(x.mT, torch.cholesky_solve(own, self._factors[group]) if group in self._factors else own)
            start += weight.shape[1]
