# A model that changes under a monitor, is interrupted, saved or wrapped; and what a monitor refuses when it is made.
from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F

import affine_divergence as ad

X = rows(6, 5)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> None:
    optimizer.zero_grad()
    bent(model(x)).backward()
    optimizer.step()


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return z


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_after_an_interrupt_inside_an_attention_torch_has_its_own_function_and_a_call_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = F.linear
    model, x = _Attends().double(), rows(2, 3, 4)
    optimizer = sgd(model)
    monitor = ad.Monitor(model, optimizer, every=1).attach()
    for going_on in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(F, "scaled_dot_product_attention", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(x)
        if going_on:
            _step(model, optimizer, x)
        monitor.detach()
        assert F.linear is own
        monitor.attach()
    monitor.detach()
    assert monitor.last is not None
    wanted = [(f"attention.{part}", 0, 6) for part in ("q_proj", "k_proj", "v_proj", "out_proj")]
    assert [(row.module, row.call, row.rows) for row in monitor.last.rows] == wanted
    assert all(check.ok for check in monitor.last.checks)


# Layers that change


def test_a_module_that_another_has_taken_the_place_of_is_told() -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        model.first = nn.Linear(5, 7).double()
        optimizer.add_param_group({"params": list(model.first.parameters())})
        _step(model, optimizer)
    status, reason = statuses(monitor.last)["first"]
    assert status == "skipped"
    assert "another module has taken its place" in reason
    assert statuses(monitor.last)["second"] == ("measured", "")


def _add(model: nn.Module) -> list[nn.Module]:
    model.add_module("third", nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)).double())
    model.second.register_module("adapter", nn.Linear(4, 2, bias=False).double())
    return [*model.third, model.second.adapter]


def _replace(model: nn.Module) -> list[nn.Module]:
    model.first, model.act, model.norm = nn.Linear(5, 7).double(), nn.PReLU().double(), nn.BatchNorm1d(4).double()
    return [model.first, model.act, model.norm]


def _wrap(model: nn.Module) -> list[nn.Module]:
    model.first = nn.Sequential(nn.Linear(5, 5).double(), model.first)
    return [model.first[0]]


def _take_away(model: nn.Module) -> list[nn.Module]:
    del model.norm
    model.second = nn.Identity()
    return []


_NEW = "added after this began to listen: begin anew to see it"
_OTHER = "another module has taken its place: begin anew to see that one"
CHANGES = {
    _add: {"third.0": _NEW, "third.1": _NEW, "second.adapter": _NEW},
    _replace: {"first": _OTHER, "act": _NEW, "norm": _OTHER},
    _wrap: {"first.0": _NEW},
    _take_away: {"norm": "no longer in the model", "second": _OTHER},
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_comes_into_a_model_or_goes_is_listed_and_counted(change: Callable[[nn.Module], list[nn.Module]]) -> None:
    model = Mlp().double()
    model.norm = nn.BatchNorm1d(4).double()  # not called
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        _step(model, optimizer)
        before = {line.module: line.reason for line in monitor.last.coverage}
        for module in change(model):
            optimizer.add_param_group({"params": list(module.parameters())})
        _step(model, optimizer)
    found = monitor.last.coverage
    reasons = {line.module: line.reason for line in found}
    assert len(reasons) == len(found)
    assert {name: reason for name, reason in reasons.items() if reason != before.get(name)} == CHANGES[change]
    assert sum(line.parameters - line.shared for line in found) == sum(p.numel() for p in model.parameters())
    measured = {name for name, (status, _) in statuses(monitor.last).items() if status == "measured"}
    assert measured == {"first", "second"} - {name for name, reason in CHANGES[change].items() if reason == _OTHER}


def test_an_attention_that_is_replaced_is_listed_and_counted_once() -> None:
    model = _Attends().double()
    optimizer = sgd(model)
    x = rows(2, 3, 4)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        model.attention = _Attends().double().attention
        optimizer.add_param_group({"params": list(model.attention.parameters())})
        _step(model, optimizer, x)
    assert statuses(monitor.last) == dict.fromkeys(("attention", "attention.out_proj"), ("skipped", _OTHER))
    assert sum(line.parameters for line in monitor.last.coverage) == sum(p.numel() for p in model.parameters())


def test_a_module_that_is_replaced_between_forward_and_step_has_its_rows_and_the_new_one_a_line() -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        model.first = nn.Linear(5, 9).double()
        optimizer.step()
    lines = [(line.module, line.status, line.reason, line.parameters) for line in monitor.last.coverage]
    assert lines == [("first", "skipped", _OTHER, 54), ("first", "measured", "", 0), ("second", "measured", "", 32)]
    assert [row.module for row in monitor.last.rows] == ["first", "second"]


def test_a_bias_that_is_taken_away_is_not_counted_any_more() -> None:
    model = nn.Sequential(nn.Linear(5, 3)).double()
    optimizer = sgd(model)
    x = X[:1]
    with ad.Monitor(model, optimizer, every=1) as monitor:
        _step(model, optimizer, x)
        assert monitor.last is not None
        assert monitor.last.rows[0].multiplier_median == pytest.approx(x.square().sum().item() + 1)
        model[0].bias = None
        _step(model, optimizer, x)
    assert monitor.last.step == 1
    assert monitor.last.rows[0].multiplier_median == pytest.approx(x.square().sum().item())
    assert [check.parameter for check in monitor.last.checks] == ["0.weight"]


class _Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_layer_whose_class_was_changed_is_skipped_with_the_reason() -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        model.first.__class__ = _Doubled
        _step(model, optimizer)
    status, reason = statuses(monitor.last)["first"]
    assert status == "skipped"
    assert "its class" in reason
    assert statuses(monitor.last)["second"] == ("measured", "")


class _Elsewhere(pickle.Unpickler):
    """Of a process where this package cannot be imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "affine_divergence":
            raise ModuleNotFoundError(f"No module named {module!r}")
        return super().find_class(module, name)


def test_an_attached_model_is_loaded_and_runs_where_the_package_cannot_be_imported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _Attends())
    optimizer = sgd(model)
    saved, pickled = io.BytesIO(), io.BytesIO()
    with ad.Monitor(model, optimizer):
        torch.save((model, optimizer), saved)
        pickle.dump((model, optimizer), pickled)
        wanted = model(rows(2, 3, 4).float())
    for stream in (saved, pickled):
        stream.seek(0)
    elsewhere: Any = SimpleNamespace(Unpickler=_Elsewhere, __name__="elsewhere")
    for loaded, _ in (torch.load(saved, weights_only=False, pickle_module=elsewhere), _Elsewhere(pickled).load()):
        assert torch.equal(loaded(rows(2, 3, 4).float()), wanted)


# The monitor itself


def test_of_with_blocks_in_each_other_the_outermost_detaches() -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    monitor = ad.Monitor(model, optimizer, every=1)
    with monitor:
        with monitor:
            _step(model, optimizer)
        _step(model, optimizer)
        assert monitor.steps == 2
        assert len(model.first._forward_hooks) == 1
    assert len(model.first._forward_hooks) == 0
    _step(model, optimizer)
    assert monitor.steps == 2


def test_a_path_that_is_a_folder_or_in_none_is_refused(tmp_path: Path) -> None:
    model = Mlp()
    for path, said in ((tmp_path, "is a folder"), (tmp_path / "none" / "steps.jsonl", "there is no folder")):
        with pytest.raises(ValueError, match=said):
            ad.Monitor(model, sgd(model), path=path)


def test_a_tracker_gets_its_values_also_when_the_file_cannot_be_written(tmp_path: Path) -> None:
    model = Mlp().double()
    optimizer = sgd(model)
    path = tmp_path / "steps.jsonl"
    got: list[int] = []
    with ad.Monitor(model, optimizer, every=1, path=path, tracker=lambda values, step: got.append(step)):
        path.mkdir()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                _step(model, optimizer)
    assert got == [0, 1, 2]
    assert len(seen) == 1


def test_lbfgs_is_refused_with_the_way_out() -> None:
    model = Mlp()
    with pytest.raises(ValueError, match=r"LBFGS.*affine_divergence\.diagnose works"):
        ad.Monitor(model, torch.optim.LBFGS(model.parameters()))
