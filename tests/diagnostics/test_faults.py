# What cannot be told of one layer is its reason in the coverage, and the other layers are told as without it.
from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, sgd, statuses, step
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.diagnostics import _capture, _counterfactual, _hooks, _stepped, _told

X = rows(6, 5)


class _OfAnyLayout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.head(torch.tanh(h.values() if h.is_nested else h))
        return out


DENSE = rows(8, 4).float()
LAYOUTS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "coo": ("sparse", DENSE.to_sparse),
    "csr": ("sparse", DENSE.to_sparse_csr),
    "jagged": ("nested", lambda: torch.nested.nested_tensor([DENSE[:3], DENSE[3:]], layout=torch.jagged)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:.*nested tensors")
def test_a_layer_of_sparse_or_nested_inputs_is_skipped_and_the_others_are_measured(name: str, set_to_none: bool) -> None:
    kind, made = LAYOUTS[name]
    model = _OfAnyLayout()
    dense, watched = copy.deepcopy(model), copy.deepcopy(model)
    wanted = ad.diagnose(dense, DENSE, None, bent, lr=0.05)
    optimizer = sgd(watched)
    with ad.Monitor(watched, optimizer, every=1) as monitor:
        z = watched(made())
        bent(z).backward(retain_graph=True)
        optimizer.zero_grad(set_to_none=set_to_none)
        bent(z).backward()
        optimizer.step()
    for found in (ad.diagnose(model, made(), None, bent, lr=0.05), monitor.last):
        assert found is not None
        assert statuses(found) == {"first": ("skipped", f"its input is a {kind} tensor: not measured"), "head": ("measured", "")}
        (row,) = found.rows
        for key in ("multiplier_median", "alignment_median", "efficiency", "interference"):
            agree(row, {key: getattr(wanted.rows[1], key)}, rel=1e-5)


def _fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault\nof ours")


SAID = "measuring it failed: ZeroDivisionError: a fault"


def _only(real: Callable[..., Any], of: Callable[..., bool]) -> Callable[..., Any]:
    return lambda *args, **options: _fails() if of(*args) else real(*args, **options)


def _while_listening(patch: pytest.MonkeyPatch, module: nn.Module) -> None:
    real = _capture.Capture.called
    patch.setattr(_capture.Capture, "called", _only(real, lambda _, parts, *rest: parts[0][0].module is module))


def _at_the_gradient(patch: pytest.MonkeyPatch, module: nn.Module) -> None:
    patch.setattr(_capture.Call, "arrive", _only(_capture.Call.arrive, lambda call, *_: call.layer.module is module))


def _in_the_rows(patch: pytest.MonkeyPatch, module: nn.Module) -> None:
    patch.setattr(_told, "rows_of_call", _only(_told.rows_of_call, lambda call, *_: call.layer.module is module))


def _in_the_measures(patch: pytest.MonkeyPatch, module: nn.Module) -> None:
    patch.setattr(_stepped, "account", _only(_stepped.account, lambda one, *_: one.layer.module is module))


PLACES = [_while_listening, _at_the_gradient, _in_the_rows, _in_the_measures]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore:the diagnosis failed at step 0")
def test_a_fault_in_one_layer_is_its_reason_and_the_others_have_their_numbers(
    place: Callable[[pytest.MonkeyPatch, nn.Module], None], monkeypatch: pytest.MonkeyPatch, faults_told: None
) -> None:
    model = Mlp().double()
    watched = copy.deepcopy(model)
    wanted = ad.diagnose(copy.deepcopy(model), X, None, bent, lr=0.05)
    optimizer = sgd(watched)
    with monkeypatch.context() as patch:
        place(patch, model.first)
        found = [ad.diagnose(model, X, None, bent, lr=0.05)]
    with monkeypatch.context() as patch, ad.Monitor(watched, optimizer, every=1) as monitor:
        place(patch, watched.first)
        step(watched, optimizer, X)
    assert monitor.last is not None
    for one in (*found, monitor.last):
        assert statuses(one) == {"first": ("skipped", SAID), "second": ("measured", "")}
        (row,) = one.rows
        agree(row, {name: getattr(wanted.rows[1], name) for name in ("multiplier_median", "efficiency", "interference", "update_ratio")})
    assert {line.module for line in found[0].counterfactual} == {"second"}


def test_a_fault_in_what_a_correction_would_do_leaves_the_other_layers_theirs(monkeypatch: pytest.MonkeyPatch, faults_told: None) -> None:
    model = Mlp().double()
    wanted = ad.diagnose(copy.deepcopy(model), X, None, bent, lr=0.05)
    real = _counterfactual._gradients
    monkeypatch.setattr(_counterfactual, "_gradients", _only(real, lambda one, kind: kind == "batch" and one.layer.module is model.first))
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    assert len(found.rows) == 2
    for line, other in zip(found.counterfactual, wanted.counterfactual, strict=True):
        if (line.kind, line.module) == ("batch", "first"):
            assert line.reason == SAID
            assert math.isnan(line.efficiency)
        else:
            assert (line.reason, line.module) == (other.reason, other.module)
            agree(line, {"efficiency": other.efficiency, "multiplier_median": other.multiplier_median})


def test_a_fault_in_an_attention_is_the_reason_of_its_projections(monkeypatch: pytest.MonkeyPatch, faults_told: None) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    monkeypatch.setattr(_hooks, "_columns", _fails)
    found = ad.diagnose(model, rows(2, 3, 4), None, bent, lr=0.05)
    said = {name: reason for name, (_, reason) in statuses(found).items()}
    assert {said[f"self_attn.{part}_proj"] for part in ("q", "k", "v", "out")} == {SAID}
    assert [row.module for row in found.rows] == ["linear1", "linear2"]


def test_in_tests_a_fault_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mlp().double()
    _in_the_measures(monkeypatch, model.first)
    with pytest.raises(ZeroDivisionError):
        ad.diagnose(model, X, None, bent, lr=0.05)
