# Random training loops over a small float64 model, with an account of every gradient that arrived, step by step.
from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import affine_divergence as ad

D = 6
LAYERS = ("embedding", "first", "second", "down", "up", "same_bias", "convolution", "asked", "affine", "sample", "head")
BLOCKS = ("first", "second", "down", "up", "same_bias", "convolution", "affine", "sample", "norm", "batch_norm", "dropout")
BLOCKS += ("reused", "tied", "queried", "in place", "tanh")
OPTIMISERS: tuple[Callable[[list[dict[str, Any]]], torch.optim.Optimizer], ...] = (
    lambda groups: torch.optim.SGD(groups, lr=0.05),
    lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    lambda groups: torch.optim.RMSprop(groups, lr=0.01),
)


class Net(nn.Module):
    """Goes through the blocks that it is told to: reused layers, tied weights and biases, a layer whose input is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.convolution = nn.Embedding(7, D), nn.Conv1d(2, 2, 3, padding=1, groups=2)
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.down, self.up, self.same_bias = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.up.weight, self.same_bias.bias = self.down.weight, self.first.bias
        self.query, self.asked = nn.Parameter(torch.randn(1, D)), nn.Linear(D, D)
        self.affine, self.sample = ad.nn.AffineLikeLinear(D, D), ad.nn.SampleCorrectedLinear(D, D)
        self.norm, self.batch_norm, self.dropout = nn.LayerNorm(D), nn.BatchNorm1d(D), nn.Dropout(0.3)
        self.head = nn.Linear(D, 3)

    def block(self, name: str, x: Tensor) -> Tensor:
        match name:
            case "reused":
                return self.first(self.first(x).tanh())
            case "tied":
                return self.up(self.down(x).tanh())
            case "queried":
                return (x + self.asked(self.query)).tanh()  # of what moves all alike a batch norm leaves rounding alone
            case "in place":
                return F.relu(self.first(x), inplace=True)
            case "tanh":
                return x.tanh()
            case "convolution":
                return self.convolution(x.view(-1, 2, D // 2)).reshape(-1, D)
        return self.get_submodule(name)(x)

    def forward(self, tokens: Tensor | None, x: Tensor, blocks: list[tuple[str, bool | None]]) -> Tensor:
        x = x if tokens is None else x + self.embedding(tokens)
        for name, reentrant in blocks:
            x = self.block(name, x) if reentrant is None else checkpoint(self.block, name, x, use_reentrant=reentrant)
        return self.head(x)


@dataclass(frozen=True, eq=False)
class Called:
    """A call of a layer; all are counted together."""

    sequence: int
    layer: str
    x: Tensor


Account = dict[nn.Parameter, dict[Called, Tensor]]  # of what is in each .grad: ∂L/∂z of the calls since the optimiser's last step


@dataclass
class Step:
    """A step that was logged, and what its numbers are to be made of."""

    net: Net
    optimizer: torch.optim.Optimizer
    account: Account
    before: dict[nn.Parameter, Tensor]
    diagnosis: ad.diagnostics.Diagnosis


class Loop:
    """A training by one, two or three optimisers with a monitor each, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.net = Net().double()
        self.parameters = list(self.net.parameters())
        if self.random.random() < 0.2:
            for p in self.random.sample(self.parameters, 2):
                p.requires_grad_(False)
        self.optimizers = [self._optimizer(part) for part in self._parts(self.random.choice((1, 1, 2, 3)))]
        self.accounts: list[Account] = [{p: {} for p in self.parameters} for _ in self.optimizers]
        self.monitors = [ad.Monitor(self.net, o, every=self.random.choice((1, 1, 2, 3))) for o in self.optimizers]
        self.adding, self.sequence = False, itertools.count()
        self.held: list[Tensor] = []
        for name in LAYERS:
            self.net.get_submodule(name).register_forward_hook(self._hook(name))

    def steps(self, length: int = 24) -> Iterator[Step]:
        """Every step that is logged, at the end whole ones."""
        actions: list[tuple[float, Callable[[], object]]] = [
            (15, self._pass),
            (7, self._clear),
            (3, self._clear_one),
            (3, self._micro_batches),
            (6, self._twice),
            (2, self._asked_for),
            (1, self._unlearned),
            (2, self._diagnose),
            (1, lambda: self.net.train(not self.net.training)),
            (2, lambda: nn.utils.clip_grad_norm_(self.parameters, self.random.choice((0.01, 0.5)))),
            (2, lambda: self.held.append(self._loss(self._forward()))),
            (2, lambda: self._backward(self.held.pop(self.random.randrange(len(self.held)))) if self.held else None),
            (0.5, lambda: (p := self.random.choice(self.parameters)).requires_grad_(not p.requires_grad)),
        ]
        weights, acts = zip(*actions, strict=True)
        for monitor in self.monitors:
            monitor.attach()
        for _ in range(length):
            if self.random.random() < 0.2:
                yield from self._step(self.random.randrange(len(self.optimizers)))
            else:
                self.random.choices(acts, weights)[0]()
        for _ in range(3):
            self._micro_batches()
            for i in range(len(self.optimizers)):
                yield from self._step(i)
        for monitor in self.monitors:
            monitor.detach()

    def _parts(self, count: int) -> list[list[nn.Parameter]]:
        """The parameters of a module together, tied ones with those of the first."""
        parts: dict[nn.Parameter, int] = {}
        for module in self.net.modules():
            own, part = list(module.parameters(recurse=False)), self.random.randrange(count)
            part = next((parts[p] for p in own if p in parts), part)
            parts |= dict.fromkeys(own, part)
        parts[self.net.query] = parts[self.net.asked.weight]  # a step of another optimiser changes what it was asked, which is told
        return [ps for part in range(count) if (ps := [p for p in parts if parts[p] == part])]

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        half = len(parameters) // 2 if self.random.random() < 0.4 else 0
        groups = [{"params": parameters[:half], "lr": 0.003}, {"params": parameters[half:]}]
        return self.random.choice(OPTIMISERS)([group for group in groups if group["params"]])

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def called(layer: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> None:
            call = Called(next(self.sequence), name, args[0].detach().clone())
            learning = [p for p in layer.parameters() if p.requires_grad]

            def arrived(g: Tensor) -> None:
                for account in self.accounts if self.adding else []:
                    for p in learning:
                        account[p][call] = account[p].get(call, 0) + g.detach().clone()

            if z.requires_grad:
                z.register_hook(arrived)

        return called

    def _forward(self, *, recomputed: bool = False) -> Tensor:
        tokens, x = self._batch()
        return self.net(tokens, x, self._blocks((None, None, False, True) if recomputed else (None,)))

    def _batch(self) -> tuple[Tensor | None, Tensor]:
        n = self.random.choice((4, 5))
        return torch.randint(0, 7, (n,)) if self.random.random() < 0.5 else None, torch.randn(n, D, dtype=torch.float64, requires_grad=True)

    def _blocks(self, recomputed: tuple[bool | None, ...] = (None,)) -> list[tuple[str, bool | None]]:
        """Each with how it is recomputed, or None."""
        names = self.random.choices(BLOCKS, k=self.random.choice((1, 2, 3, 8)))
        return [(name, self.random.choice(recomputed)) for name in names]

    def _loss(self, z: Tensor) -> Tensor:
        target = torch.randint(0, 3, (len(z),))
        target[0] = self.random.choice((target[0], -100))
        return F.cross_entropy(z, target, reduction=self.random.choice(("mean", "sum")))

    def _backward(self, loss: Tensor, *, again: bool = False) -> None:
        self.adding = True
        loss.backward(retain_graph=again)
        self.adding = False

    def _pass(self) -> None:
        self._backward(self._loss(self._forward(recomputed=True)))

    def _clear(self) -> None:
        self._cleared(self.net, self.parameters)

    def _clear_one(self) -> None:
        optimizer = self.random.choice(self.optimizers)
        self._cleared(optimizer, [p for group in optimizer.param_groups for p in group["params"]])

    def _cleared(self, of: nn.Module | torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        of.zero_grad(set_to_none=self.random.random() < 0.6)
        for account in self.accounts:
            account.update({p: {} for p in parameters})

    def _micro_batches(self) -> None:
        self._clear()
        for _ in range(self.random.randint(1, 3)):
            self._pass()

    def _unlearned(self) -> None:
        with self.random.choice((torch.no_grad, torch.inference_mode))():
            self._forward()

    def _asked_for(self) -> None:
        loss = self._loss(self._forward())
        torch.autograd.grad(loss, [p for p in self.parameters if p.requires_grad], allow_unused=True, retain_graph=True)
        self.random.choice((self._backward, self.held.append))(loss)

    def _twice(self) -> None:
        z = self._forward()
        loss = self._loss(z)
        self._backward(loss, again=True)
        self.random.choice((self._clear, self._clear_one, lambda: None))()
        self._backward(self.random.choice((loss, z.square().mean())))

    def _diagnose(self) -> None:
        optimizer, (tokens, x) = self.random.choice(self.optimizers), self._batch()
        before = self._state(optimizer)
        given = {"tokens": tokens, "x": x, "blocks": [("dropout", None), *self._blocks()]}
        ad.diagnose(self.net, given, None, lambda z: z.square().mean(), optimizer=optimizer, counterfactual=self.random.random() < 0.3)
        torch.testing.assert_close(self._state(optimizer), before, rtol=0, atol=0)

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        gradients = {f"{i}.grad": p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        optimised = {f"{i}.{key}": value for i, state in enumerate(optimizer.state.values()) for key, value in state.items()}
        return copy.deepcopy({**self.net.state_dict(), **gradients, **optimised, "random": torch.get_rng_state()})

    def _step(self, i: int) -> Iterator[Step]:
        self.held.clear()  # the parameters in their graphs are about to change in place
        monitor = self.monitors[i]
        step = monitor.steps
        before = {p: p.detach().clone() for p in self.parameters}
        self.optimizers[i].step()
        if step % monitor.every == 0:
            assert monitor.last is not None
            assert monitor.last.step == step
            yield Step(self.net, self.optimizers[i], self.accounts[i], before, monitor.last)
        self.accounts[i] = {p: {} for p in self.parameters}
