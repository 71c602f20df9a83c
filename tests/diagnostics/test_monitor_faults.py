# What a monitor must not do: keep tensors, grow, count what is in no step, or stop a training when something in it fails.
from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, sgd, step, then_tanh
from torch import Tensor, nn

import affine_divergence as ad

WIDE = rows(6, 5)
X = WIDE.float()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> float:
    return step(model, optimizer, x)


def _leaves(model: nn.Module) -> None:
    with torch.no_grad():
        model(X)
    bent(model(X))  # dropped
    model.eval()
    model(X)
    model.train()


def test_forwards_without_a_backward_leave_nothing_behind() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        z = model(X)
        seen = weakref.ref(z)
        del z
        assert seen() is None
        _leaves(model)
        _step(model, optimizer)
        assert monitor.last is not None
        assert {(row.module, row.call, row.rows + row.masked) for row in monitor.last.rows} == {("first", 0, 6), ("second", 0, 6)}


@pytest.mark.parametrize(("every", "steps"), [(50, 1000), (1, 60)])
def test_nothing_grows_over_a_thousand_steps(every: int, steps: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(3, 2)
    with ad.Monitor(model, optimizer, every=every):
        counts = []
        for step in range(1, steps + 1):
            model(x)  # dropped
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if step in (steps // 10, steps // 2, steps):
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert max(counts[1:]) <= counts[0] + 50, counts


def test_what_was_seen_is_let_go_after_the_step() -> None:
    model = then_tanh(nn.Linear, 5, 4)()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1):
        x = X.clone()
        seen = weakref.ref(x)
        _step(model, optimizer, x)
        del x
        gc.collect()
        assert seen() is None


def test_between_logged_steps_nothing_is_kept() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=10):
        _step(model, optimizer)
        x = X.clone()
        optimizer.zero_grad()
        loss = bent(model(x))
        loss.backward()
        seen = weakref.ref(x)
        del x, loss
        gc.collect()
        assert seen() is None


def _after_a_saliency_map(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = WIDE.clone().requires_grad_()
    torch.autograd.grad(bent(model(x)), x)
    optimizer.zero_grad()
    bent(model(WIDE)).backward()


def _after_dropped_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    bent(model(2 * WIDE)).backward()
    optimizer.zero_grad()
    bent(model(WIDE)).backward()


def _twice_through_one_graph(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = bent(model(WIDE))
    (loss / 4).backward(retain_graph=True)
    (3 * loss / 4).backward()


@pytest.mark.parametrize("backward", [_after_a_saliency_map, _after_dropped_gradients, _twice_through_one_graph])
def test_only_what_is_in_the_gradient_of_the_step_counts(backward: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    twin = copy.deepcopy(model)
    optimizer, of_twin = sgd(model), sgd(twin)
    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(twin, of_twin, every=1) as plain:
        for _ in range(2):
            backward(model, optimizer)
            optimizer.step()
            _step(twin, of_twin, WIDE)
    assert monitor.last is not None
    assert plain.last is not None
    assert len(monitor.last.rows) == 2
    for row, other in zip(monitor.last.rows, plain.last.rows, strict=True):
        agree(row, {name: value for name, value in vars(other).items() if isinstance(value, float)})
    assert all(check.ok for check in monitor.last.checks)


def test_gradients_of_earlier_steps_left_in_place_are_told_by_the_self_check() -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for factor in (1, 2):
            bent(model(factor * WIDE)).backward()
            optimizer.step()
    assert monitor.last is not None
    assert not any(check.ok for check in monitor.last.checks)
    assert {row.verdict for row in monitor.last.rows} == {"look"}


def _fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault of the diagnosis")


def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    from affine_divergence.diagnostics import _capture

    monkeypatch.setattr(_capture.Call, "arrive", _fails)


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_fault_of_its_own_is_shown_once_and_stops_no_training(monkeypatch: pytest.MonkeyPatch, action: Any, faults_told: None) -> None:
    torch.manual_seed(0)
    model = Mlp()
    twin = copy.deepcopy(model)
    of_twin = sgd(twin)
    wanted = [_step(twin, of_twin) for _ in range(4)]
    _broken(monkeypatch)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=action == "always") as seen:
        warnings.simplefilter(action)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            found = [_step(model, optimizer) for _ in range(4)]
    assert found == wanted
    assert monitor.last is not None
    assert {line.reason for line in monitor.last.coverage} == {"measuring it failed: ZeroDivisionError: a fault of the diagnosis"}
    if action == "always":
        assert seen is not None
        assert ["a fault of the diagnosis" in str(warning.message) for warning in seen] == [True]


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_fault_of_a_tracker_or_a_file_is_shown_once_and_stops_no_training(tmp_path: Path, action: Any) -> None:
    folder = tmp_path / "gone when the first step is logged"
    for given in ({"tracker": _fails}, {"path": folder / "steps.jsonl"}):
        folder.mkdir()
        model = Mlp()
        optimizer = sgd(model)
        with warnings.catch_warnings(record=action == "always") as seen:
            warnings.simplefilter(action)
            monitor = ad.Monitor(model, optimizer, every=1, **given)
            folder.rmdir()
            with monitor:
                for _ in range(3):
                    _step(model, optimizer)
        if action == "always":
            assert seen is not None
            assert len(seen) == 1


def test_an_optimiser_of_another_model_is_refused_or_told() -> None:
    model, other = Mlp(), Mlp()
    with pytest.raises(ValueError, match="optimizer"):
        ad.Monitor(model, sgd(other))


class _Wrapper(torch.optim.Optimizer):
    """An optimiser by type alone, as accelerate's: never initialised as one, it passes on to the one that it holds."""

    def __init__(self, inner: torch.optim.Optimizer, name: str) -> None:
        setattr(self, name, inner)
        self.param_groups = inner.param_groups


def test_a_wrapper_that_runs_no_hooks_is_refused_with_the_way_out() -> None:
    model = Mlp()
    with pytest.raises(TypeError, match=r"_Wrapper was never initialised.* give the one inside whose step\(\) it calls: optimizer\.base$"):
        ad.Monitor(model, _Wrapper(sgd(model), "base"))
    with pytest.raises(TypeError, match="_Wrapper was never initialised"):
        ad.Monitor(model, _Wrapper(_Wrapper(sgd(model), "base"), "optimizer"))


def test_of_a_wrapper_the_optimiser_inside_is_followed_and_of_one_with_hooks_itself() -> None:
    model = Mlp()
    inner = sgd(model)
    with ad.Monitor(model, _Wrapper(_Wrapper(inner, "optimizer"), "optimizer"), every=1) as monitor:
        _step(model, inner)
    assert monitor.last is not None

    class Outer(torch.optim.SGD):
        optimizer = inner

    outer = Outer(model.parameters(), lr=0.1)
    with ad.Monitor(model, outer, every=1) as monitor:
        _step(model, inner)
        assert monitor.last is None
        _step(model, outer)
    assert monitor.last is not None


def _hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook"])
def test_an_error_while_attaching_leaves_no_hook_and_a_later_attach_works(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    model = nn.Sequential(Mlp(), nn.MultiheadAttention(4, 2))
    optimizer = sgd(model)
    monitor = ad.Monitor(model, optimizer, every=1)
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, place, _fails)
        with pytest.raises(ZeroDivisionError), monitor:
            pass
        assert _hooks(model) == len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    with monitor:
        _step(model[0], optimizer)
    assert monitor.last is not None
    assert _hooks(model) == 0


class _Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is mostly written: two halves of a step, and a step() that nobody calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.01)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise AssertionError("not by this")


def _by_halves(model: nn.Module, optimizer: _Sam, steps: int = 30) -> None:
    for _ in range(steps):
        for half in (optimizer.first_step, optimizer.second_step):
            bent(model(X)).backward()
            half()


@pytest.mark.parametrize("action", ["always", "error"])
def test_an_optimiser_whose_step_nobody_calls_is_told_once(action: Any) -> None:
    model = Mlp()
    optimizer = _Sam(model)
    with warnings.catch_warnings(record=action == "always") as seen:
        warnings.simplefilter(action)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            _by_halves(model, optimizer)
    assert monitor.last is None
    if action == "always":
        assert seen is not None
        (text,) = [str(warning.message) for warning in seen]
        assert "step() of _Sam was never called" in text
        assert "give the Monitor the optimizer whose step() is called: optimizer.base_optimizer" in text


def test_of_an_optimiser_by_halves_the_base_optimiser_is_followed() -> None:
    model = Mlp()
    optimizer = _Sam(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ad.Monitor(model, optimizer.base_optimizer, every=1) as monitor:
            _by_halves(model, optimizer)
    assert not seen
    assert monitor.steps == 30
    assert monitor.last is not None
    assert [row.call for row in monitor.last.rows] == [0, 0]
    assert all(check.ok for check in monitor.last.checks)


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    bent(model(X)).backward()


def _accumulate_while_weights_are_kept_to_a_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():  # as weights that are kept to a norm in each forward
        for parameter in model.parameters():
            parameter.mul_(1.0)
    bent(model(X)).backward()


def _look_at_inputs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    bent(model(X)).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("between", [_accumulate, _accumulate_while_weights_are_kept_to_a_norm, _look_at_inputs])
def test_what_takes_long_before_a_step_is_not_taken_for_an_optimiser_that_nobody_calls(
    between: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    model = Mlp()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ad.Monitor(model, optimizer, every=1) as monitor:
            for _ in range(150):
                between(model, optimizer)
            _step(model, optimizer)
    assert not seen
    assert monitor.last is not None


def test_an_optimiser_that_steps_in_turns_with_another_is_not_told_to_be_one_that_nobody_calls() -> None:
    model = Mlp()
    optimizer, other = sgd(model), sgd(model)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ad.Monitor(model, optimizer, every=1) as monitor:
            _step(model, optimizer)
            for _ in range(30):
                _step(model, other)
    assert not seen
    assert monitor.steps == 1


def _critic_first(optimizers: dict[str, torch.optim.Optimizer], model: nn.ModuleDict) -> None:
    """A step of the generator after many of the critic."""
    for _ in range(30):
        optimizers["critic"].zero_grad()
        bent(model["critic"](model["generator"](X).detach())).backward()
        optimizers["critic"].step()
    optimizers["generator"].zero_grad()
    bent(model["critic"](model["generator"](X))).backward()
    optimizers["generator"].step()


def test_steps_of_an_optimiser_of_other_parameters_are_not_taken_for_steps_that_are_not_seen() -> None:
    model = nn.ModuleDict({"generator": nn.Linear(5, 4), "critic": nn.Linear(4, 3)})
    optimizers: dict[str, torch.optim.Optimizer] = {name: sgd(part) for name, part in model.items()}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ad.Monitor(model, optimizers["generator"], every=1) as monitor:
            for _ in range(2):
                _critic_first(optimizers, model)
    assert not seen
    assert monitor.last is not None
    assert [row.module for row in monitor.last.rows] == ["generator"]


@pytest.mark.parametrize("cleared", ["head", "all", "frozen"])
def test_a_head_that_another_optimiser_trains_first_is_not_taken_for_a_model_that_does(cleared: str) -> None:
    model = Mlp(inplace=False)
    probe, full = sgd(model.second), sgd(model)
    model.first.requires_grad_(cleared != "frozen")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ad.Monitor(model, full, every=1) as monitor:
            for _ in range(40):
                (probe if cleared == "head" else full).zero_grad()
                bent(model(X)).backward()
                probe.step()
            model.first.requires_grad_(True)
            full.zero_grad()
            bent(model(X)).backward()
            full.step()
    assert not seen
    assert monitor.last is not None
    assert [row.call for row in monitor.last.rows] == [0, 0]
