# Gradients that are cleared between two backward passes have no part in the step: through one graph again, reused, tied, recomputed.
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import affine_divergence as ad

X = rows(6, 5)
OWN = ("multiplier_median", "multiplier_p5", "multiplier_p95", "alignment_median", "efficiency", "below_zero", "rows", "masked")


class _Reused(nn.Module):
    """Three calls of one layer, of which the first output is also asked for alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer(x).tanh()
        return self.head(self.layer(self.layer(first).sin())), first


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.down(x).tanh()
        return self.up(first), first


def _probed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    z, first = model(X)
    bent(first).backward(retain_graph=True)
    optimizer.zero_grad()
    bent(z).backward(retain_graph=True)
    optimizer.zero_grad()
    bent(z).backward()


def _probed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    z, first = model(X)
    bent(z).backward(retain_graph=True)
    optimizer.zero_grad(set_to_none=False)
    (bent(z) + bent(first)).backward()


def _first_call_last(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    z, first = model(X)
    bent(z).backward(retain_graph=True)
    optimizer.zero_grad()
    bent(first).backward(retain_graph=True)
    bent(z).backward()


def _added_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    z, first = model(X)
    bent(first).backward(retain_graph=True)
    bent(z).backward(retain_graph=True)
    bent(z).backward()


LOSSES: dict[Callable[[nn.Module, torch.optim.Optimizer], None], Callable[[nn.Module], Tensor]] = {
    _probed: lambda model: bent(model(X)[0]),
    _probed_in_place: lambda model: sum(map(bent, model(X)), torch.tensor(0.0)),
    _first_call_last: lambda model: sum(map(bent, model(X)), torch.tensor(0.0)),
    _added_up: lambda model: bent((out := model(X))[0]) * 2 + bent(out[1]),
}


@pytest.mark.parametrize("make", [_Reused, _Tied])
@pytest.mark.parametrize("passes", LOSSES, ids=lambda passes: passes.__name__.strip("_"))
@pytest.mark.parametrize("plain", [True, False])
def test_passes_through_one_graph_count_since_the_gradient_was_cleared(
    make: Callable[[], nn.Module], passes: Callable[[nn.Module, torch.optim.Optimizer], None], plain: bool
) -> None:
    model = make().double()
    twin = copy.deepcopy(model)
    wanted, _ = oracles.diagnosis(twin, sgd(twin), LOSSES[passes])
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
        passes(model, optimizer)
        optimizer.step()
    found = monitor.last
    assert found is not None
    assert {(row.module, row.call) for row in found.rows} == set(wanted)
    for row in found.rows:
        names = wanted[row.module, row.call].keys() - {"rank", "rank_limit"} if plain else OWN
        agree(row, {name: wanted[row.module, row.call][name] for name in names})
    assert all(check.ok for check in found.checks)
    made = Counter(row.module for row in found.rows)
    assert {line.module: (line.calls, line.fired) for line in found.coverage} == {name: (n, n) for name, n in made.items()}


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_layer_whose_gradient_was_cleared_and_not_made_again_is_not_told(again: bool, set_to_none: bool, plain: bool) -> None:
    model = Mlp(inplace=False).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
        h = model.first(X)
        bent(model.second(h)).backward(retain_graph=True)
        optimizer.zero_grad(set_to_none=set_to_none)
        if again:
            bent(h).backward()
        optimizer.step()
    found = monitor.last
    assert found is not None
    assert [row.module for row in found.rows] == ["first"] * again
    assert all(check.ok for check in found.checks)
    status, reason = statuses(found)["second"]
    assert status == "skipped"
    assert "was gone when the optimiser stepped" in reason


def test_a_tied_weight_is_asked_for_by_each_of_its_layers() -> None:
    # The head's gradient is of the third pass, the embedding's of the first, which was cleared, and .grad is there all the same.
    model = _Tied().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)[0]).backward()
        optimizer.zero_grad()
        bent(model.up(X)).backward()
        bent(model.down(2 * X)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert [(row.module, row.call) for row in monitor.last.rows] == [("up", 0), ("down", 0)]
    assert all(check.ok for check in monitor.last.checks)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_rows_whose_gradients_are_zeros_by_themselves_are_told(set_to_none: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].bias.zero_()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for _ in range(2):  # two micro-batches
                F.mse_loss(model(X), torch.ones(6, 3, dtype=torch.float64)).backward()
            optimizer.step()
    assert monitor.last is not None
    assert [(row.module, row.call, row.rows) for row in monitor.last.rows] == [("0", 0, 0), ("2", 0, 6), ("0", 1, 0), ("2", 1, 6)]


class _Recomputed(nn.Module):
    """A layer outside and inside a part that is recomputed by a backward in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        y = checkpoint(lambda t: self.layer(t).sin(), y, use_reentrant=True)
        return self.layer(y)


class _Kept(_Recomputed):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x).tanh()).sin())


@pytest.mark.parametrize("cleared", [False, True])
def test_a_backward_inside_a_backward_is_no_other_pass(cleared: bool) -> None:
    model = _Recomputed().double()
    twin = _Kept().double()
    twin.load_state_dict(model.state_dict())
    wanted, _ = oracles.diagnosis(twin, sgd(twin), lambda model: bent(model(X)))
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        if cleared:
            bent(model(3 * X)).backward()
            optimizer.zero_grad()
        bent(model(X)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert len(monitor.last.rows) == len(wanted) == 3
    medians = sorted(row["multiplier_median"] for row in wanted.values())
    assert sorted(row.multiplier_median for row in monitor.last.rows) == pytest.approx(medians, rel=1e-8)
    assert all(check.ok for check in monitor.last.checks)


def test_what_a_loss_tries_by_itself_and_clears_is_not_in_a_diagnosis() -> None:
    model = Mlp(inplace=False).double()
    twin = copy.deepcopy(model)

    def tries(z: Tensor) -> Tensor:
        (3 * z.sum()).backward(retain_graph=True)
        model.zero_grad()
        return bent(z)

    found, wanted = ad.diagnose(model, X, None, tries, lr=0.05), ad.diagnose(twin, X, None, bent, lr=0.05)
    for row, other in zip(found.rows, wanted.rows, strict=True):
        agree(row, {name: value for name, value in vars(other).items() if isinstance(value, float)})
    assert all(check.ok for check in found.checks)


def test_where_only_the_gradient_of_a_bias_is_gone_the_self_check_says_so() -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        model.first.bias.grad = None
        optimizer.step()
    assert monitor.last is not None
    assert [row.module for row in monitor.last.rows] == ["first", "second"]
    reasons = {check.parameter: check.reason for check in monitor.last.checks if not check.ok}
    assert list(reasons) == ["first.bias"]
    assert "was gone when the optimiser stepped" in reasons["first.bias"]
