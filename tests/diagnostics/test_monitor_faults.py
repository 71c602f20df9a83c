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
def test_a_fault_of_its_own_is_shown_once_and_stops_no_training(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
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
    assert monitor.last is None
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
