# Gradients that are cleared between two backward passes have no part in the step: through one graph again, reused, tied, recomputed.
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
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
    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(model, optimizer, every=1, plain=False) as blind:
        bent(model(X)).backward()
        model.first.bias.grad = None
        optimizer.step()
    assert monitor.last is not None
    assert [row.module for row in monitor.last.rows] == ["first", "second"]
    assert blind.last is not None
    assert ["was cleared" in row.reason for row in blind.last.rows] == [True, False]
    reasons = {check.parameter: check.reason for check in monitor.last.checks if not check.ok}
    assert list(reasons) == ["first.bias"]
    assert "was gone when the optimiser stepped" in reasons["first.bias"]


def _biases(model: nn.Module) -> list[nn.Parameter]:
    return [model.first.bias, model.second.bias]


@pytest.mark.parametrize("plain", [True, False])
def test_only_the_parameters_that_the_optimiser_steps_are_asked_whether_a_gradient_is_there(plain: bool) -> None:
    # The weights learn, this optimiser has them not, and nobody clears their gradients.
    found = []
    for skipped in (True, False):
        torch.manual_seed(0)
        model = Mlp().double()
        optimizer = torch.optim.SGD(_biases(model), lr=0.05)
        with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
            if skipped:
                bent(model(3 * X)).backward()
                optimizer.zero_grad()
            bent(model(X)).backward()
            optimizer.step()
        assert monitor.last is not None
        found.append(monitor.last)
    assert [(row.module, row.call) for row in found[0].rows] == [("first", 0), ("second", 0)]
    for row, wanted in zip(found[0].rows, found[1].rows, strict=True):
        agree(row, {name: value for name, value in vars(wanted).items() if isinstance(value, float)})
        assert (row.verdict, row.reason) == (wanted.verdict, wanted.reason)


def test_parameters_that_an_optimiser_gets_later_are_asked_too() -> None:
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=0.05)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [model.first.bias]})
        for factor in (1.0, 3.0):
            optimizer.zero_grad()
            bent(model(factor * X)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert [(row.module, row.call) for row in monitor.last.rows] == [("first", 0), ("second", 0)]
    assert all(check.ok for check in monitor.last.checks)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_a_sparse_gradient_without_entries_is_gone(sparse: bool, plain: bool) -> None:
    layer = nn.Embedding(8, 4, sparse=sparse).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    with ad.Monitor(layer, optimizer, every=1, plain=plain) as monitor:
        bent(layer(torch.tensor([1, 2, 3]))).backward()
        optimizer.zero_grad(set_to_none=False)
        bent(layer(torch.tensor([4, 5]))).backward()
        optimizer.step()
    assert monitor.last is not None
    assert [(row.call, row.rows) for row in monitor.last.rows] == [(0, 2)]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_what_the_closure_of_a_step_clears_has_no_part_in_it(plain: bool, named: bool) -> None:
    model = Mlp(inplace=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = bent(model.second(model.first(X).detach()))
        loss.backward()
        return loss

    with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
        bent(model(X)).backward()
        optimizer.step(**{"closure": closure}) if named else optimizer.step(closure)
    assert monitor.last is not None
    assert [(row.module, row.call) for row in monitor.last.rows] == [("second", 0)]
    assert "was gone" in statuses(monitor.last)["first"][1]
    assert all(check.ok for check in monitor.last.checks)


def test_what_a_closure_adds_to_stays() -> None:
    model = Mlp(inplace=False).double()
    optimizer = sgd(model)

    def closure() -> Tensor:
        loss = bent(model(2 * X))
        loss.backward()
        return loss

    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        optimizer.step(closure)
    assert monitor.last is not None
    assert [(row.module, row.call) for row in monitor.last.rows] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    assert all(check.ok for check in monitor.last.checks)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_gradient_that_a_hook_sets_to_zero_is_told_and_one_that_is_cleared_is_not(passes: int) -> None:
    model = Mlp(inplace=False).double()
    for parameter in model.first.parameters():
        parameter.register_hook(torch.zeros_like)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(passes):
            bent(model(X)).backward()
        optimizer.step()
        told = monitor.last
        optimizer.zero_grad()
        for _ in range(passes):
            bent(model(X)).backward()
        optimizer.zero_grad(set_to_none=False)
        bent(model.second(model.first(X).detach())).backward()
        optimizer.step()
    assert told is not None
    assert [row.module for row in told.rows] == ["first", "second"] * passes
    assert [row.verdict for row in told.rows if row.module == "first"] == ["look"] * passes
    assert {c.parameter for c in told.checks if not c.ok} == {"first.weight", "first.bias"}
    assert monitor.last is not None
    assert [row.module for row in monitor.last.rows] == ["second"]
    assert "by a hook" in statuses(monitor.last)["first"][1]


class _Answers(TorchDispatchMode):
    """Counts the numbers that are brought from the device to Python one by one, and the lists of them."""

    def __init__(self) -> None:
        super().__init__()
        self.single = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.single += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def _asked_for(depth: int, set_to_none: bool) -> int:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(depth))).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor, _Answers() as answers:
        for _ in range(3):
            bent(model(X)).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        bent(model(X)).backward()
        assert len(monitor._capture.calls) == depth
    return answers.single


@pytest.mark.parametrize("set_to_none", [True, False])
def test_whether_gradients_are_there_is_no_wait_for_each_layer(set_to_none: bool) -> None:
    assert _asked_for(12, set_to_none) == _asked_for(3, set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_where_one_of_two_gradients_was_cleared_between_passes_that_is_the_reason_of_a_look(set_to_none: bool) -> None:
    model = Mlp(inplace=False).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(model, optimizer, every=1, plain=False) as blind:
        bent(model(X)).backward()
        if set_to_none:
            model.first.weight.grad = None
        else:
            assert model.first.weight.grad is not None
            model.first.weight.grad.zero_()
        bent(model(2 * X)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert blind.last is not None
    assert {check.parameter for check in monitor.last.checks if not check.ok} == {"first.weight"}
    for found, said in ((monitor.last, "only in part"), (blind.last, "was cleared")):
        assert [(row.module, row.call) for row in found.rows] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
        assert [(row.verdict, said in row.reason.split("; ")[0]) for row in found.rows if row.module == "first"] == [("look", True)] * 2
        assert not any(said in row.reason for row in found.rows if row.module == "second")
