# What else goes forward and backward between two steps: passes for other gradients, dropped ones, penalties, other threads.
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, sgd
from torch import Tensor, nn

import affine_divergence as ad

X = rows(6, 5)


def _plain(model: nn.Module) -> None:
    bent(model(X)).backward()


def _saliency_before(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    loss = bent(model(x))
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def _saliency_backward(model: nn.Module) -> None:
    x = X.clone().requires_grad_()
    loss = bent(model(x))
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward()


def _saliency_after(model: nn.Module) -> None:
    bent(model(X)).backward()
    x = X.clone().requires_grad_()
    torch.autograd.grad(bent(model(x)), x)


def _gradients_asked_for(model: nn.Module) -> None:
    bent(model(X)).backward()
    torch.autograd.grad(bent(model(2 * X)), list(model.parameters()))


def _forward_after(model: nn.Module) -> None:
    bent(model(X)).backward()
    model(2 * X)


def _dropped_in_place(model: nn.Module) -> None:
    bent(model(2 * X)).backward()
    for p in model.parameters():  # as zero_grad(set_to_none=False) does
        assert p.grad is not None
        p.grad.zero_()
    bent(model(X)).backward()


OTHERS = [_saliency_before, _saliency_backward, _saliency_after, _gradients_asked_for, _forward_after, _dropped_in_place]


@pytest.mark.parametrize("passes", OTHERS, ids=lambda passes: passes.__name__.strip("_"))
def test_a_pass_that_adds_nothing_to_the_gradient_is_no_call_and_changes_no_number(passes: Callable[[nn.Module], None]) -> None:
    models = [Mlp().double()]
    models.append(copy.deepcopy(models[0]))
    found = []
    for model, run in zip(models, (passes, _plain), strict=True):
        optimizer = sgd(model)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            for _ in range(2):
                optimizer.zero_grad()
                run(model)
                optimizer.step()
        found.append(monitor.last)
    others, plain = found
    assert others is not None
    assert plain is not None
    assert [(row.module, row.call) for row in others.rows] == [("first", 0), ("second", 0)]
    for row, wanted in zip(others.rows, plain.rows, strict=True):
        agree(row, {name: value for name, value in vars(wanted).items() if isinstance(value, float)})
        assert (row.verdict, row.reason) == (wanted.verdict, wanted.reason)
    assert all(check.ok for check in others.checks)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_step_after_one_that_the_scaler_skipped_has_its_own_call_alone(set_to_none: bool) -> None:
    model = Mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with ad.Monitor(model, optimizer, every=1, grad_scaler=scaler) as monitor:
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad(set_to_none=set_to_none)
            scaler.scale(factor * bent(model(X.float()))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert monitor.steps == 2
    assert monitor.last is not None
    assert [(row.module, row.call, row.rows + row.masked) for row in monitor.last.rows] == [("first", 0, 6), ("second", 0, 6)]
    assert all(check.ok for check in monitor.last.checks)
    assert monitor.last.about["loss scale"] == 2.0**9


class _Bends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def test_under_a_gradient_penalty_a_layer_has_one_call_and_the_check_says_that_it_explains_a_part() -> None:
    model = _Bends().double()
    before = copy.deepcopy(model.layer)
    g = _gradient_at_output(model)
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        x = X.clone().requires_grad_()
        z = model(x)
        (slope,) = torch.autograd.grad(z.sin().sum(), x, create_graph=True)
        (bent(z) + slope.square().sum()).backward()
        optimizer.step()
    assert monitor.last is not None
    (row,) = monitor.last.rows
    with torch.no_grad():
        multipliers = -((model.layer(X) - before(X)) * g).sum(1) / (0.05 * g.square().sum(1))
    assert row.call == 0
    assert row.multiplier_median == pytest.approx(multipliers.quantile(0.5).item(), rel=1e-8)
    of_weight, of_bias = (next(c for c in monitor.last.checks if c.parameter == f"layer.{name}") for name in ("weight", "bias"))
    assert not of_weight.ok
    assert "only in part" in of_weight.reason
    assert of_bias.ok
    assert row.verdict == "look"


def _gradient_at_output(model: _Bends) -> Tensor:
    """∂L/∂z with the penalty in L, z an input of its own to what follows the layer."""
    z = model.layer(X).detach().requires_grad_()
    bent_z = z.tanh()
    slope = (bent_z.cos() * (1 - bent_z.square())) @ model.layer.weight.detach()  # of the sum of sines at x, by hand
    (g,) = torch.autograd.grad(bent(bent_z) + slope.square().sum(), z)
    return g


def test_a_diagnosis_in_another_thread_makes_a_monitor_miss_no_step() -> None:
    model, other = Mlp().double(), Mlp().double()
    optimizer = sgd(model)
    inside, done = threading.Event(), threading.Event()

    def waits(z: Tensor) -> Tensor:
        inside.set()
        assert done.wait(20)
        return bent(z)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ad.diagnose(other, X, None, waits, rank=False, counterfactual=False)))
    with ad.Monitor(model, optimizer, every=1) as monitor:
        thread.start()
        assert inside.wait(20)
        try:
            for _ in range(2):
                optimizer.zero_grad()
                bent(model(X)).backward()
                optimizer.step()
        finally:
            done.set()
            thread.join()
    assert monitor.steps == 2
    assert monitor.last is not None
    assert [row.call for row in monitor.last.rows] == [0, 0]
    assert [row.call for row in found[0].rows] == [0, 0]


class _Branches(nn.Module):
    """Parts of a model that run in threads of their own, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branches = nn.Linear(5, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        with ThreadPoolExecutor(3) as pool:
            return self.norm(sum(pool.map(lambda branch: branch(h), self.branches)))


class _InTurn(_Branches):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.norm(sum(branch(h) for branch in self.branches))


def _by_name(found: ad.Diagnosis | None) -> list[tuple[Any, ...]]:
    assert found is not None
    return sorted((row.module, row.call, row.multiplier_median, row.efficiency) for row in found.rows)


def test_what_a_model_runs_in_threads_is_in_its_diagnosis() -> None:
    model = _Branches().double()
    twin = _InTurn().double()
    twin.load_state_dict(model.state_dict())
    found = _by_name(ad.diagnose(model, X, None, bent, lr=0.05))
    assert found == _by_name(ad.diagnose(twin, X, None, bent, lr=0.05))
    assert [row[:2] for row in found] == [("branches.0", 0), ("branches.1", 0), ("branches.2", 0), ("first", 0)]


@pytest.mark.parametrize("include", [None, "first"])
def test_threads_of_a_diagnosis_are_not_of_a_monitor(include: str | None) -> None:
    found = []
    for asked in (False, True):
        torch.manual_seed(0)
        model = _Branches().double()
        optimizer = sgd(model)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            bent(model(X)).backward()
            if asked:
                ad.diagnose(model, 2 * X, None, bent, optimizer=optimizer, include=include)
            optimizer.step()
            found.append(_by_name(monitor.last))
            optimizer.zero_grad()
            bent(model(X)).backward()
            optimizer.step()
            found.append(_by_name(monitor.last))
    assert found[:2] == found[2:]
    assert len(found[0]) == 4


class _TakesNoHooks(nn.Linear):
    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError


def test_a_diagnosis_that_cannot_listen_leaves_the_model_to_the_monitor() -> None:
    model = nn.Sequential(Mlp(), _TakesNoHooks(4, 3)).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1, include="0.*") as monitor:
        with pytest.raises(ZeroDivisionError):
            ad.diagnose(model, X, None, bent, optimizer=optimizer)
        assert len(model[0].first._forward_hooks) == 1
        bent(model(X)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert [row.module for row in monitor.last.rows] == ["0.first", "0.second"]


def test_a_diagnosis_inside_one_has_its_own_calls_and_the_outer_one_its() -> None:
    model = _Branches().double()
    wanted = _by_name(ad.diagnose(copy.deepcopy(model), X, None, bent, lr=0.05))
    inside = []

    def asks(z: Tensor) -> Tensor:
        if not inside:
            inside.append(_by_name(ad.diagnose(model, X, None, bent, lr=0.05)))
        return bent(z)

    assert _by_name(ad.diagnose(model, X, None, asks, lr=0.05)) == wanted
    assert inside == [wanted]
