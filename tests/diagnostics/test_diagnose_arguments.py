# What diagnose takes and what it refuses: inputs, losses, optimisers, rates.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F

import affine_divergence as ad

X = rows(6, 5)


# Losses, inputs, outputs


def test_positional_and_keyword_inputs_and_a_loss_of_the_output_are_taken() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"z": self.layer(a + b)}

    model = Two().double()
    kinds: list[Any] = [(X, 2 * X), [X, 2 * X], {"a": X, "b": 2 * X}]
    found = [ad.diagnose(model, inputs, None, lambda out: bent(out["z"])) for inputs in kinds]
    assert repr(found[0].rows) == repr(found[1].rows) == repr(found[2].rows)


def test_a_loss_that_no_parameter_has_a_part_in_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError), match="loss"):
        ad.diagnose(Mlp().double(), X, None, lambda z: z.detach().sum())


@pytest.mark.parametrize("loss", [lambda z: z, lambda z: 1.0, lambda z: None], ids=["rows", "number", "none"])
def test_a_loss_that_is_no_scalar_tensor_is_refused(loss: Callable[[Tensor], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="loss"):
        ad.diagnose(Mlp().double(), X, None, loss)


def test_without_a_loss_the_output_must_have_one() -> None:
    with pytest.raises((TypeError, ValueError), match="loss"):
        ad.diagnose(Mlp().double(), X)


@pytest.mark.parametrize("model", [None, "mlp", F.relu, Mlp], ids=["none", "text", "function", "class"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ad.diagnose(model, X, None, bent)


@pytest.mark.parametrize("lr", [0, -1.0, math.nan, math.inf, True, "0.1"])
def test_a_rate_must_be_positive(lr: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="lr"):
        ad.diagnose(Mlp().double(), X, None, bent, lr=lr)


def test_an_optimizer_has_its_own_rate() -> None:
    model = Mlp().double()
    with pytest.raises((TypeError, ValueError), match="lr"):
        ad.diagnose(model, X, None, bent, optimizer=sgd(model), lr=0.1)


def test_the_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer"):
        ad.diagnose(Mlp().double(), X, None, bent, optimizer=sgd(Mlp().double()))


def test_layers_that_the_optimizer_does_not_hold_have_not_moved() -> None:
    model = Mlp().double()
    found = ad.diagnose(model, X, None, bent, optimizer=torch.optim.SGD(model.first.parameters(), lr=0.05))
    status = statuses(found)
    measured = {row.module: row for row in found.rows}
    assert "first" in measured
    if "second" in measured:
        assert measured["second"].update_ratio == 0.0
    else:
        assert "optimizer" in status["second"][1]


def test_a_model_of_frozen_parameters_is_refused_or_has_no_rows() -> None:
    model = Mlp().double().requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError), match=r"loss|frozen|requires_grad"):
        ad.diagnose(model, X, None, bent)


def test_a_model_without_a_layer_that_is_measured_says_so() -> None:
    found = ad.diagnose(nn.LayerNorm(5).double(), X, None, bent)
    assert not found.rows
    assert [line.status for line in found.coverage] == ["skipped"]
    str(found)


def test_a_model_that_differentiates_in_its_forward_is_diagnosed() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp(inplace=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.body(x).tanh().sum(), x, create_graph=True)[0]

    found = ad.diagnose(Force().double(), X, None, bent, lr=0.01)
    assert found.loss is not None
    assert found.loss.realised == pytest.approx(found.loss.predicted, rel=0.1)
    assert not any(check.ok for check in found.checks if check.parameter.endswith("weight"))  # a way that the rows do not tell of
    assert all(row.verdict != "ok" for row in found.rows)


def test_a_loss_with_parameters_of_its_own_moves_with_the_model_and_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model, head = Mlp().double(), nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-5)
    before = head.weight.detach().clone()
    found = ad.diagnose(model, X, None, lambda z: head(z).square().mean(), optimizer=optimizer)
    assert found.loss is not None
    assert found.loss.realised == pytest.approx(found.loss.predicted, rel=1e-3)
    for step in found.steps:  # of the measured layers alone: the loss's own parameters stay
        assert step.realised == pytest.approx(step.predicted, rel=1e-3)
    assert torch.equal(head.weight, before)
    assert head.weight.grad is None
