# The measures of a diagnosis against the oracle, over the table of cases; and the oracle against itself.
from __future__ import annotations

import copy

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import CASES, Case, agree
from oracles import close

import affine_divergence as ad

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
    assert vars(found.loss) == pytest.approx(change, rel=1e-9, abs=1e-14)
