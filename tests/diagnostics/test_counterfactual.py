# What corrections would do on the same batch: the table against the oracle, the steps of one length against real corrected layers.
from __future__ import annotations

import copy
import math
from typing import Any

import correction_oracles
import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import CASES, Case, Mlp, agree, bent, convnet, rows, sgd
from torch import Tensor, nn

import affine_divergence as ad

STRUCTURAL = ("affine-like", "norm-like")
PLAIN = {
    name: CASES[name]
    for name in (
        *("linear 2-D", "linear 3-D", "linear without bias", "one row", "more rows than inputs", "rows that repeat"),
        *("frozen weight", "frozen bias", "reused", "two losses", "conv1d", "conv1d groups dilation", "conv1d same even"),
        *("conv2d stride that floors", "conv2d depthwise", "conv2d reflect", "conv2d frozen weight", "conv2d frozen bias", "conv3d"),
        *("transposed 1d", "transposed 2d", "convolutions and a head", "attention padded", "cross attention of other sizes"),
        *("attention partly frozen",),
    )
}


def _table(case: Case) -> dict[tuple[str, str, int], Any]:
    model, (inputs, targets) = case.model(), case.batch()
    found = ad.diagnose(model, inputs, targets, case.loss_fn, optimizer=case.optimise(model), rank=False)
    lines = {(line.kind, line.module, line.call): line for line in found.counterfactual}
    assert len(lines) == len(found.counterfactual) == 5 * len(found.rows)
    return lines


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_the_table_of_plain_layers_is_the_oracles(case: Case) -> None:
    table, twin = _table(case), case.twin(case.model())
    calls, _ = oracles.captured(twin, case.loss)
    for name, of_layer in calls.items():
        learns = {part: p.requires_grad for part, p in twin.get_submodule(name).named_parameters(recurse=False)}
        for kind in correction_oracles.KINDS:
            wanted = correction_oracles.counterfactual(kind, of_layer, 0.05, learns.get("bias", False))
            for i, row in enumerate(wanted):
                line = table[kind, name, i]
                agree(line, row)
                assert line.reason == ""
                assert line.basis == ("first order, g held fixed" if kind in STRUCTURAL else "exact")


def test_none_has_the_numbers_of_the_plain_column() -> None:
    for name in ("embedding", "embedding padding", "affine-like", "patch norm", "sample-corrected", "conv2d depthwise"):
        case = CASES[name]
        model, (inputs, targets) = case.model(), case.batch()
        found = ad.diagnose(model, inputs, targets, case.loss_fn, lr=0.3)
        table = {(line.module, line.call): line for line in found.counterfactual if line.kind == "none"}
        for row in found.rows:
            measures = ("multiplier_p5", "multiplier_median", "multiplier_p95", "alignment_median", "below_zero", "efficiency")
            line = table[row.module, row.call]
            agree(line, {name: getattr(row, f"{name}_plain") for name in measures} | {"interference": row.interference})
            assert (line.rows, line.masked) == (row.rows, row.masked)


def test_layers_that_are_corrected_already_have_a_reason_and_no_numbers() -> None:
    for name in ("affine-like", "norm-like", "patch norm"):
        for (kind, _, _), line in _table(CASES[name]).items():
            assert (line.reason != "") == (kind != "none")
            assert math.isnan(line.multiplier_median) == (kind != "none")


def test_tokens_are_one_hot_so_that_the_structural_kinds_have_a_reason_and_sample_changes_nothing() -> None:
    table = {key: line for key, line in _table(CASES["embedding"]).items() if key[1] == "embedding"}
    for kind in STRUCTURAL:
        assert "one-hot" in table[kind, "embedding", 0].reason
    none, sample = (vars(table[kind, "embedding", 0]) for kind in ("none", "sample"))
    agree(table["sample", "embedding", 0], {key: value for key, value in none.items() if isinstance(value, float)})
    assert sample["reason"] == ""


def test_the_teaching_example_of_the_family() -> None:
    # Benzing, appendix F: inputs (3, 1) and (1, 0), wanted +1 and −1, w = 0: ideal (1, −1), plain (7, 2), sample (−2, −0.7).
    layer = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(layer.weight)
    x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]).double(), torch.tensor([[1.0], [-1.0]]).double()
    for reduction in ("sum", "mean"):
        found = ad.diagnose(layer, x, target, lambda z, t, r=reduction: 0.5 * nn.functional.mse_loss(z, t, reduction=r))
        of = {line.kind: line for line in found.counterfactual}
        # δz/(−g) of the two rows, both as far from the median
        assert of["none"].multiplier_median == pytest.approx((7 - 2) / 2)
        assert of["none"].multiplier_mean * of["none"].multiplier_cv == pytest.approx((7 + 2) / 2)
        assert of["sample"].multiplier_median == pytest.approx((2 * -1 + 0.7) / 2)
        assert of["batch"].multiplier_median == pytest.approx(1, rel=0.05)  # damped
        assert of["batch"].efficiency == pytest.approx(-1, rel=0.01)
        assert found.rows[0].update_ratio == math.inf or math.isnan(found.rows[0].update_ratio)


def _corrected(model: nn.Module, kind: str) -> nn.Module:
    """The model with layers whose gradients are corrected."""
    names = {nn.Linear: "Linear", nn.Conv2d: "Conv2d"}
    for name, layer in list(model.named_modules()):
        if type(layer) in names and kind != "none":
            made = getattr(ad.nn, f"{kind.capitalize()}Corrected{names[type(layer)]}")
            if isinstance(layer, nn.Linear):
                new = made(layer.in_features, layer.out_features).double()
            else:
                new = made(layer.in_channels, layer.out_channels, layer.kernel_size).double()
            new.load_state_dict(layer.state_dict())
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
    return model


@pytest.mark.parametrize(("make", "x"), [(Mlp, rows(6, 5)), (convnet, rows(2, 4, 6, 5))], ids=["mlp", "convnet"])
@pytest.mark.parametrize("optimise", [sgd, lambda m: torch.optim.Adam(m.parameters(), lr=0.01)], ids=["sgd", "adam"])
def test_steps_of_one_length_along_each_correction_do_to_the_loss_what_is_said(make: Any, x: Tensor, optimise: Any) -> None:
    torch.manual_seed(3)
    model = make().double()
    found = ad.diagnose(model, x, None, bent, optimizer=optimise(model))
    steps = {step.kind: step for step in found.steps}
    assert list(steps) == ["actual", "none", "sample", "batch"]
    moving = [name for name, _ in model.named_parameters() if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d)]

    stepped = copy.deepcopy(model)
    optimizer = optimise(stepped)
    start = bent(stepped(x))
    start.backward()
    slope = {name: stepped.get_parameter(name).grad.clone() for name in moving}
    optimizer.step()
    changes = {"actual": {name: stepped.get_parameter(name).detach() - model.get_parameter(name).detach() for name in moving}}
    length = math.sqrt(sum(float(change.square().sum()) for change in changes["actual"].values()))
    for kind in ("none", "sample", "batch"):
        twin = _corrected(copy.deepcopy(model), kind)
        bent(twin(x)).backward()
        gradients = {name: twin.get_parameter(name).grad for name in moving}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        changes[kind] = {name: -length / norm * g for name, g in gradients.items()}
    for kind, change in changes.items():
        end = copy.deepcopy(model)
        with torch.no_grad():
            for name, delta in change.items():
                end.get_parameter(name).add_(delta)
            after = bent(end(x))
        assert steps[kind].norm == pytest.approx(length, rel=1e-9)
        assert steps[kind].predicted == pytest.approx(sum(float((slope[name] * delta).sum()) for name, delta in change.items()), rel=1e-7)
        assert steps[kind].realised == pytest.approx((after - start).item(), rel=1e-7, abs=1e-13)


def test_without_it_there_is_none() -> None:
    found = ad.diagnose(Mlp().double(), rows(6, 5), None, bent, counterfactual=False)
    assert not found.counterfactual
    assert not found.steps
