# What can not be measured is said with the reason: parametrised, frozen, functional, compiled; and what only looks like it is measured.
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import accelerate
import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import Attends, Mlp, agree, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import affine_divergence as ad

X = rows(6, 5)


# What can not be measured is said, with the reason


class _OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, 2 * self.weight, self.bias)


class _OwnConstructor(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 4)


def _weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(5, 4))


def _old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        return nn.utils.weight_norm(nn.Linear(5, 4))


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(5, 4), "weight", 0.5)


def _doubled() -> nn.Module:
    class Twice(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    layer = nn.Linear(5, 4)
    parametrize.register_parametrization(layer, "bias", Twice())
    return layer


def _instance_forward() -> nn.Module:
    layer = nn.Linear(5, 4)
    layer.forward = lambda input: F.linear(input, 2 * layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


def _compiled_forward() -> nn.Module:
    layer = nn.Linear(5, 4)
    layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    return layer


def _wrapped_by_another() -> nn.Module:
    layer = nn.Linear(5, 4)
    hook = type("Doubles", (accelerate.hooks.ModelHook,), {"post_forward": lambda self, module, output: 2 * output})()
    return accelerate.hooks.add_hook_to_module(layer, hook)


def _frozen() -> nn.Module:
    return nn.Linear(5, 4).requires_grad_(False)


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (_weight_norm, "parametrised"),
    "old weight_norm": (_old_weight_norm, "parametrised"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(5, 4)), "parametrised"),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(5, 4)), "parametrised"),
    "pruned": (_pruned, "parametrised"),
    "parametrised bias": (_doubled, "parametrised"),
    "own forward": (lambda: _OwnForward(5, 4), "its class has a forward of its own"),
    "forward of the instance": (_instance_forward, "its forward was replaced, on the instance"),
    "forward compiled": (_compiled_forward, "its forward was replaced, on the instance"),
    "forward in a hook that does more than move": (_wrapped_by_another, "its forward was replaced, on the instance"),
    "bilinear": (lambda: _Bilinear(), "not a type"),
    "frozen": (_frozen, "frozen"),
    "complex": (lambda: _Complex(), "complex"),
    "lstm": (lambda: _Lstm(), "fused"),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(5, 5, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, x)
        return out


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 4, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(torch.complex128)).abs()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self  # stays complex in double()


class _Lstm(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(5, 4)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x)[0]
        return out


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_skipped_is_listed_with_its_reason_and_the_rest_is_measured(name: str) -> None:
    make, word = LAYERS[name]
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(4, 3)).double()
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    status = statuses(found)
    skipped = {module: reason for module, (what, reason) in status.items() if what == "skipped"}
    assert skipped
    assert all(module.split(".")[0] == "0" for module in skipped)
    assert any(word in reason for reason in skipped.values()), skipped
    assert {row.module for row in found.rows} == {"2"}
    assert status["2"] == ("measured", "")


@pytest.mark.parametrize("make", [Mlp, lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0)], ids=["linear", "attention"])
def test_a_model_whose_tensors_accelerate_moves_is_measured_as_without(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    plain = copy.deepcopy(model)
    accelerate.hooks.attach_align_device_hook(model, execution_device="cpu")
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True), append=True)
    assert "forward" in vars(model.get_submodule("first" if isinstance(model, Mlp) else "linear1"))
    found, wanted = ad.diagnose(model, X, None, bent, lr=0.05), ad.diagnose(plain, X, None, bent, lr=0.05)
    assert found.rows == wanted.rows
    assert {name for name, (status, _) in statuses(found).items() if status == "measured"} == {row.module for row in wanted.rows}


def test_a_subclass_that_only_constructs_otherwise_is_measured() -> None:
    found = ad.diagnose(nn.Sequential(_OwnConstructor(), nn.Tanh()).double(), X, None, bent)
    assert [(row.module, row.type) for row in found.rows] == [("0", "_OwnConstructor")]


def test_an_embedding_that_renormalises_itself_is_skipped_with_the_reason() -> None:
    model = nn.Sequential(nn.Embedding(6, 5, max_norm=1.0), nn.Linear(5, 3)).double()
    found = ad.diagnose(model, torch.tensor([[0, 1], [2, 2]]), None, bent)
    assert "max_norm" in statuses(found)["0"][1]
    assert {row.module for row in found.rows} == {"1"}


class _Functional(nn.Module):
    """Uses a layer's weight without calling the layer; also calls it where asked to."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.layer, self.unused, self.head, self.calls = nn.Linear(5, 5), nn.Linear(3, 3), nn.Linear(5, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.layer.weight, self.layer.bias).tanh()
        out: Tensor = self.head(self.layer(x).tanh() if self.calls else x)
        return out


def test_layers_that_are_not_called_are_listed_as_not_called() -> None:
    found = ad.diagnose(_Functional(calls=False).double(), X, None, bent)
    status = statuses(found)
    for name in ("layer", "unused"):
        assert status[name][0] == "skipped"
        assert ("without calling it" if name == "layer" else "not called") in status[name][1]
    assert {row.module for row in found.rows} == {"head"}


def test_a_weight_that_is_also_used_by_a_function_fails_the_self_check_and_says_so() -> None:
    found = ad.diagnose(_Functional(calls=True).double(), X, None, bent)
    checks = {check.parameter: check for check in found.checks}
    assert not checks["layer.weight"].ok
    assert checks["layer.weight"].error > 0.01
    assert checks["layer.weight"].reason
    assert checks["head.weight"].ok


def test_the_projections_of_an_attention_out_proj_are_not_called_not_called() -> None:
    found = ad.diagnose(Attends().double(), rows(5, 2, 4), None, bent)
    assert {row.module for row in found.rows} == {"before", "after", *(f"attention.{part}_proj" for part in ("q", "k", "v", "out"))}
    assert not [line for line in found.coverage if line.status == "skipped"]


def test_an_attention_of_a_class_of_its_own_forward_is_skipped() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:  # type: ignore[override]
            return super().forward(2 * query, key, value, **options)

    model = Attends()
    model.attention.__class__ = Own
    found = ad.diagnose(model.double(), rows(5, 2, 4), None, bent)
    assert {row.module for row in found.rows} == {"before", "after"}
    assert "forward" in statuses(found)["attention"][1]


def test_include_takes_patterns_and_the_rest_is_listed_as_left_out() -> None:
    found = ad.diagnose(Mlp().double(), X, None, bent, include="first")
    assert {row.module for row in found.rows} == {"first"}
    assert statuses(found)["second"][0] == "skipped"
    assert "include" in statuses(found)["second"][1]
    with pytest.raises(ValueError, match="thrid"):
        ad.diagnose(Mlp().double(), X, None, bent, include="thrid*")


# Compiled


@pytest.mark.parametrize("whole", [True, False], ids=["compiled before", "compiled in place"])
def test_a_compiled_model_is_measured_or_listed_and_never_zeros(whole: bool) -> None:
    torch.compiler.reset()
    model = Mlp(inplace=False).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    if not whole:
        model.compile(backend="eager")
        compiled = model
    compiled(X)
    found = ad.diagnose(compiled, X, None, bent, optimizer=sgd(model))
    if found.rows:
        wanted, _ = oracles.diagnosis(twin, sgd(twin), lambda m: bent(m(X)))
        for row in found.rows:
            agree(row, wanted[row.module.removeprefix("_orig_mod."), row.call])
    listed = {line.module.removeprefix("_orig_mod."): line for line in found.coverage}
    assert set(listed) >= {"first", "second"}
    for name in ("first", "second"):
        measured = any(row.module.removeprefix("_orig_mod.") == name for row in found.rows)
        assert (listed[name].status == "measured") == measured
        assert measured or "compiled" in listed[name].reason


def test_a_monitor_of_a_compiled_model_says_that_no_hook_fired() -> None:
    torch.compiler.reset()
    model = Mlp(inplace=False)
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    compiled(X.float()).sum().backward()
    with ad.Monitor(model, optimizer, every=1) as monitor:
        optimizer.zero_grad()
        bent(compiled(X.float())).backward()
        optimizer.step()
    assert monitor.last is not None
    status = statuses(monitor.last)
    for name in ("first", "second"):
        measured = any(row.module == name for row in monitor.last.rows)
        assert (status[name][0] == "measured") == measured
        assert measured or "compiled" in status[name][1]
    for row in monitor.last.rows:
        assert row.multiplier_median > 0
