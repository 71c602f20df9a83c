# The measures of a diagnosis against the oracle, over the table of cases; and the oracle against itself.
from __future__ import annotations

import copy

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import CASES, OPTIMISERS, Case, agree, bent
from oracles import close
from torch import Tensor
from torch.utils._pytree import tree_map_only

import affine_divergence as ad
from affine_divergence.diagnostics import _measures, _rank

UNTIED = {name: case for name, case in CASES.items() if "tied" not in name}  # what a tied weight moves is more than one layer's Gram matrix
# Torch says once in a process that it copies the input.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_the_twin_that_the_oracle_takes_apart_has_the_loss_of_the_model(case: Case) -> None:
    model = case.model()
    loss = case.loss(model).item()
    assert case.loss(case.twin(copy.deepcopy(model))).item() == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("case", UNTIED.values(), ids=UNTIED)
def test_the_oracles_gram_matrix_says_what_the_plain_gradient_does_to_bare_layers(case: Case) -> None:
    before = case.twin(case.model())
    after = copy.deepcopy(before)
    calls, _ = oracles.captured(before, case.loss)
    gradients = oracles.uncorrected_gradients(before, case.loss)
    with torch.no_grad():
        for name, p in after.named_parameters():
            if name in gradients:
                p -= gradients[name]
    assert calls
    for name, of_layer in calls.items():
        for i, call in enumerate(of_layer):
            wanted = -(oracles.self_terms(call).unsqueeze(1) * call.g + oracles.others_by_gram(of_layer, i))
            moved = call.moved(before.get_submodule(name), after.get_submodule(name))
            close(moved[call.g.any(1)], wanted[call.g.any(1)], tolerance=1e-9)


@cases
def test_every_number_of_a_diagnosis_is_that_of_the_oracle(case: Case) -> None:
    model, (inputs, targets) = case.model(), case.batch()
    twin = case.twin(copy.deepcopy(model))
    wanted, change = oracles.diagnosis(twin, case.optimise(twin), case.loss)
    found = ad.diagnose(model, inputs, targets, case.loss_fn, optimizer=case.optimise(model), counterfactual=False)
    assert {(row.module, row.call) for row in found.rows} == set(wanted)
    assert len(found.rows) == len(wanted)
    for row in found.rows:
        agree(row, wanted[row.module, row.call])
    assert found.loss is not None
    assert {name: getattr(found.loss, name) for name in change} == pytest.approx(change, rel=1e-9, abs=1e-14)


NARROW = {name: case for name, case in CASES.items() if name not in OPTIMISERS}


@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_in_float32_the_numbers_are_the_oracles_up_to_rounding(case: Case) -> None:
    model, (inputs, targets) = case.model().float(), case.batch()
    twin = case.twin(copy.deepcopy(model)).double()
    wanted, _ = oracles.diagnosis(twin, case.optimise(twin), case.loss)
    narrow = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)
    found = ad.diagnose(model, narrow, targets, case.loss_fn, optimizer=case.optimise(model), counterfactual=False)
    assert len(found.rows) == len(wanted)
    for row in found.rows:
        for name, value in wanted[row.module, row.call].items():
            got = getattr(row, name)
            assert got == pytest.approx(value, rel=5e-3, abs=1e-3, nan_ok=True), f"{name} is {got}, not {value}"
    assert all(check.ok for check in found.checks), found.checks


PARTED = ("linear 5-D", "conv2d depthwise", "conv3d", "reused", "attention padded", "embedding padding", "patch norm")


@pytest.mark.parametrize("name", PARTED)
def test_rows_told_a_few_at_a_time_have_the_same_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for attribute, size in (("_PART", 9), ("_BLOCK", 5)):
        assert getattr(_measures, attribute) > size
        monkeypatch.setattr(_measures, attribute, size)
    monkeypatch.setattr(_rank, "_PART", 20)
    case = CASES[name]
    test_every_number_of_a_diagnosis_is_that_of_the_oracle(case)
    test_in_float32_the_numbers_are_the_oracles_up_to_rounding(case)


@pytest.mark.parametrize("scale", [1e-32, 1e-18, 1e12])
def test_the_size_of_a_float32_loss_changes_no_number_of_the_plain_column(scale: float) -> None:
    model, x = CASES["conv2d stride that floors"].model().float(), CASES["conv2d stride that floors"].batch()[0].float()
    found, other = (ad.diagnose(model, x, None, lambda z, f=factor: f * bent(z), lr=1e-12) for factor in (1.0, scale))
    for row, scaled in zip(found.rows, other.rows, strict=True):
        names = [name for name in vars(row) if name.endswith("_plain") and "update" not in name]
        for name in (*names, "interference", "rows", "self_term_median"):
            assert getattr(scaled, name) == pytest.approx(getattr(row, name), rel=1e-3), name
