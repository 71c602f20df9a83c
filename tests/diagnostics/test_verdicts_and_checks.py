# Verdicts and checks where they are easily wrong: shared layers, maximising, corrected layers, extreme sizes, narrow dtypes.
from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diagnosis_cases import Mlp, agree, bent, rows, statuses
from torch import Tensor, nn
from torch.nn import functional as F

import affine_divergence as ad
from affine_divergence.diagnostics._verdict import verdict

X = rows(6, 4)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(x)


@pytest.mark.parametrize(("factor", "together"), [(3.0, True), (-1.0, False)])
def test_a_call_that_goes_up_while_its_layer_goes_down_is_to_be_looked_at_and_not_broken(factor: float, together: bool) -> None:
    # Of z₀ − f z₁ the step moves both by −(1 − f): call 0 goes up for f > 1, and what call 1 gains outweighs it.
    found = ad.diagnose(_Twice().double(), X, None, lambda z: z[0].sum() - factor * z[1].sum(), lr=1e-3)
    first, second = found.rows
    assert found.loss is not None
    assert found.loss.realised < 0
    if together:
        assert first.efficiency > 0.05  # broken, were it alone
        assert first.verdict == "look"
        assert "against" not in second.reason
        assert "goes against its objective" in first.reason
        assert "other calls with its parameters outweigh" in first.reason
    else:
        assert "against" not in first.reason + second.reason


def test_a_layer_all_of_whose_calls_together_go_up_is_broken() -> None:
    model = _Twice().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.99)
    for _ in range(3):
        optimizer.zero_grad()
        model(X)[0].sum().backward()
        optimizer.step()
    found = ad.diagnose(model, X, None, lambda z: -z[0].sum() - 0.1 * z[1].sum(), optimizer=optimizer)
    assert {row.verdict for row in found.rows} == {"broken"}
    assert all("goes against its objective" in row.reason and "outweigh" not in row.reason for row in found.rows)


class _Turns(nn.Module):
    """Two calls with one weight, of which a loss may weigh each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), self.layer(x.flip(0))])


PULL = rows(12, 3, seed=5)


def _pulled(z: Tensor, aside: float) -> Tensor:
    """Whose gradient is the same along one direction, and differs by `aside` along another."""
    return (z * PULL).sum() + aside * (z * PULL.flip(1)).sum()


def _after_other_batches(*, plain: bool, aside: float) -> tuple[ad.Diagnosis, Tensor]:
    """A step by momentum of batches that pull the other way, in part; with the change that it made."""
    model = _Turns().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(8):
        optimizer.zero_grad()
        (-_pulled(model(X), aside)).backward()
        optimizer.step()
    before = model(X).detach()
    optimizer.zero_grad()
    with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
        _pulled(model(X), -aside).backward()
        optimizer.step()
    assert monitor.last is not None
    return monitor.last, model(X).detach() - before


def _jointly(change: Tensor, g: Tensor) -> float:
    return ((change * g).sum() / (change.norm() * g.norm())).item()


def test_a_step_that_momentum_of_other_batches_carries_uphill_is_to_be_looked_at() -> None:
    aside = 0.5
    found, change = _after_other_batches(plain=True, aside=aside)
    g = PULL - aside * PULL.flip(1)
    step, plain = _jointly(change, g), _jointly(-_gram(X) @ g, g)
    assert step > 0.05
    assert plain < -0.1
    assert step < -0.9 * plain
    assert len(found.rows) == 2
    for row in found.rows:
        assert row.verdict == "look"
        said = f"(efficiency {step:+.2f}), where the plain gradient would not ({plain:+.2f}): momentum"
        assert said in row.reason
        assert row.reason.count("to first order") == 1
    blind, _ = _after_other_batches(plain=False, aside=aside)
    for row in blind.rows:
        assert row.verdict == "broken"
        assert f"efficiency {step:+.2f}" in row.reason
        assert "not known where the plain gradient is not" in row.reason


def _gram(x: Tensor) -> Tensor:
    x = torch.cat([torch.cat([x, x.flip(0)]), torch.ones(2 * len(x), 1, dtype=x.dtype)], 1)
    return x @ x.mT


class _Ascends(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.neg_()
        super().step(closure)


@pytest.mark.parametrize("make", [_Turns, lambda: nn.Linear(4, 3)], ids=["reused", "once"])
def test_a_step_as_steep_uphill_as_the_plain_gradient_is_downhill_is_broken(make: Any) -> None:
    model = make().double()
    found = ad.diagnose(model, X, None, bent, optimizer=_Ascends(model.parameters(), lr=1e-3))
    assert {row.verdict for row in found.rows} == {"broken"}
    assert all("is a sign wrong?" in row.reason for row in found.rows)


def test_a_step_uphill_of_a_plain_gradient_that_is_hardly_downhill_is_broken_and_momentum_no_reason() -> None:
    row = {"rows": 6, "update_ratio": 0.01, "multiplier_p5": -1.0, "multiplier_p95": 1.0, "alignment_median": 0.0, "efficiency": 0.2}
    row |= {"below_zero": 0.5, "self_term_p5": 1.0, "self_term_p95": 1.0}
    ruling, reason = verdict(row, 0.1, 0.2, -0.05)
    assert ruling == "broken"
    assert "plain" not in reason
    assert verdict(row, 0.1, 0.2, -0.5)[0] == "look"
    assert [verdict(row, 0.1, up, -0.5)[0] for up in (0.44, 0.46)] == ["look", "broken"]


def test_a_step_uphill_of_rows_that_do_not_explain_the_gradient_is_to_be_looked_at_for_that() -> None:
    row = {"rows": 6, "update_ratio": 0.01, "multiplier_p5": -1.0, "multiplier_p95": 1.0, "alignment_median": 0.0, "efficiency": 0.2}
    row |= {"below_zero": 0.5, "self_term_p5": 1.0, "self_term_p95": 1.0}
    assert verdict(row, 0.1, 0.2, -0.05)[0] == "broken"
    ruling, reason = verdict(row, 0.1, 0.2, -0.05, check="the captured calls explain it only in part")
    assert ruling == "look"
    assert reason.startswith("the captured calls explain it only in part; ")
    assert "efficiency +0.20" in reason
    assert verdict(row | {"efficiency": math.nan}, 0.1, 0.2, -0.05, check="…")[0] == "broken"  # what is not finite


def _penalised(*, plain: bool, every_row: bool = True) -> ad.Diagnosis:
    """A step of plain gradient descent on a loss with a penalty of the slope, of which the rows of the captured part go uphill."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh() if every_row else nn.LeakyReLU(0.2), nn.Linear(7, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with ad.Monitor(model, optimizer, every=1, plain=plain) as monitor:
        x = X.clone().requires_grad_()
        z = model(x)
        (slope,) = torch.autograd.grad(z.sin().sum() if every_row else z.sum(), x, create_graph=True)
        (bent(model(X)) + 100 * (slope.norm(dim=1) - 3).square().mean()).backward()
        optimizer.step()
    assert monitor.last is not None
    return monitor.last


@pytest.mark.parametrize("plain", [True, False])
def test_under_a_gradient_penalty_no_layer_is_broken_and_the_penalty_is_named(plain: bool) -> None:
    rows = _penalised(plain=plain).rows
    assert max(row.efficiency for row in rows) > 0.05
    for row in rows:
        assert row.verdict == "look"
        assert "create_graph=True" in row.reason.split("; ")[0]


def test_of_the_forward_of_a_penalty_whose_rows_have_no_gradient_it_is_not_said_that_nothing_is_learned() -> None:
    first = _penalised(plain=True, every_row=False).rows[0]
    assert first.rows == 0
    assert "nothing is learned" not in first.reason
    assert "create_graph=True" in first.reason


def _of_sign(maximize: bool) -> ad.Diagnosis:
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, maximize=maximize)
    return ad.diagnose(model, rows(6, 5), None, lambda z: -bent(z) if maximize else bent(z), optimizer=optimizer)


def test_to_maximise_the_negative_is_to_minimise() -> None:
    up, down = _of_sign(True), _of_sign(False)
    for row, wanted in zip(up.rows, down.rows, strict=True):
        agree(row, {name: value for name, value in vars(wanted).items() if isinstance(value, float)})
        assert (row.verdict, row.reason) == (wanted.verdict, wanted.reason)
    steps = {step.kind: (step.norm, step.predicted, step.realised) for step in up.steps}
    assert steps["actual"][1] > 0
    assert steps["none"] == pytest.approx(steps["actual"], rel=1e-8)
    assert steps == {step.kind: pytest.approx((step.norm, -step.predicted, -step.realised), rel=1e-8) for step in down.steps}
    assert all(check.ok for check in up.checks)


def test_a_layer_whose_weight_and_bias_pull_apart_is_skipped_with_the_reason() -> None:
    model = Mlp().double()
    first = [{"params": [model.first.weight], "maximize": True}, {"params": [model.first.bias]}]
    optimizer = torch.optim.SGD([*first, {"params": list(model.second.parameters())}], lr=0.1)
    found = statuses(ad.diagnose(model, rows(6, 5), None, bent, optimizer=optimizer))
    assert found["first"][0] == "skipped"
    assert "maximise" in found["first"][1]
    assert found["second"] == ("measured", "")


# What a row would do alone


@pytest.mark.parametrize("layer", [ad.nn.SampleCorrectedLinear(4, 3), ad.nn.SampleCorrectedConv1d(2, 3, 2)], ids=["linear", "conv"])
def test_the_sample_correction_divides_by_all_that_learns_also_where_another_optimiser_steps_it(layer: nn.Module) -> None:
    layer.double()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in layer.parameters()]
    x = torch.randn(6, 4, dtype=torch.float64) if isinstance(layer, nn.Linear) else torch.randn(6, 2, 3, dtype=torch.float64)
    monitors = [ad.Monitor(layer, optimizer, every=1).attach() for optimizer in optimizers]
    layer(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    shares = []
    for monitor in monitors:
        monitor.detach()
        assert monitor.last is not None
        assert [check.ok for check in monitor.last.checks] == [True]
        shares.append(monitor.last.rows[0])
    # The weight's part of a row's rate and the bias's are 1 together: quantiles of one are those of the other from the other end.
    assert shares[0].self_term_p5 + shares[1].self_term_p95 == pytest.approx(1.0, rel=1e-12)
    assert shares[0].self_term_median + shares[1].self_term_median == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_a_sample_corrected_layer_would_all_learn_at_one_rate(bias: bool) -> None:
    layer = ad.nn.SampleCorrectedLinear(4, 3, bias=bias).double()
    (row,) = ad.diagnose(layer, X, None, bent, lr=1e-3).rows
    assert (row.self_term_p5, row.self_term_median, row.self_term_p95) == (1.0, 1.0, 1.0)
    assert "rows alone" not in row.reason
    (alone,) = ad.diagnose(layer, X[:1], None, bent, lr=1e-3).rows
    assert alone.multiplier_median == pytest.approx(1.0)
    (zero,) = ad.diagnose(layer, 0 * X[:1], None, bent, lr=1e-3).rows
    assert zero.self_term_median == float(bias)


def test_what_a_batch_corrected_row_would_do_alone_is_not_said() -> None:
    (row,) = ad.diagnose(ad.nn.BatchCorrectedLinear(4, 3).double(), X, None, bent, lr=1e-3).rows
    assert all(math.isnan(number) for number in (row.self_term_p5, row.self_term_median, row.self_term_p95))
    assert math.isfinite(row.multiplier_median)


def test_a_tiny_row_is_divided_by_its_own_length_without_an_overflow() -> None:
    x, g = X.float(), rows(6, 3, seed=4).float()
    x[0] *= 1e-20
    found = ad.diagnose(nn.Linear(4, 3, bias=False), x, None, lambda z: (z * g).sum(), lr=1e-3)
    (line,) = (line for line in found.counterfactual if line.kind == "sample")
    wide, g = x.double(), g.double()
    gram = wide @ wide.T / wide.square().sum(1)  # of row i at j: ⟨x_i, x_j⟩/‖x_j‖²
    multipliers = (gram @ g * g).sum(1) / g.square().sum(1)
    agree(line, {"multiplier_mean": multipliers.mean().item(), "multiplier_median": multipliers.quantile(0.5).item()}, rel=1e-5)
    assert line.below_zero == (multipliers < 0).double().mean().item()
    assert all(math.isfinite(value) for value in vars(line).values() if isinstance(value, float))
    assert all(math.isfinite(step.realised) for step in found.steps)


# Updates


@pytest.mark.parametrize("size", [1e-20, 1e-30])
def test_the_update_ratio_of_tiny_weights_is_a_number(size: float) -> None:
    layer = nn.Linear(4, 3)
    nn.init.constant_(layer.weight, size)
    g = rows(6, 3, seed=4).float()
    (row,) = ad.diagnose(layer, X.float(), None, lambda z: (z * g).sum(), lr=1e-3).rows
    wanted = 1e-3 * (g.double().T @ X.float().double()).norm().item() / (layer.weight.double().norm().item())
    agree(row, {"update_ratio": wanted, "update_ratio_plain": wanted}, rel=1e-5)
    nn.init.zeros_(layer.weight)
    (row,) = ad.diagnose(layer, X.float(), None, lambda z: (z * g).sum(), lr=1e-3).rows
    assert row.update_ratio == math.inf
    assert "of their norm" not in row.reason


def test_where_the_weight_has_no_rate_the_bias_counts() -> None:
    layer = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD([{"params": [layer.weight], "lr": 0.0}, {"params": [layer.bias], "lr": 0.1}])
    g = rows(6, 3, seed=4)
    (row,) = ad.diagnose(layer, X, None, lambda z: (z * g).sum(), optimizer=optimizer).rows
    multipliers = (g.sum(0) * g).sum(1) / g.square().sum(1)  # δz_i = −0.1 Σ_j g_j
    agree(row, {"multiplier_median": multipliers.quantile(0.5).item(), "multiplier_mean": multipliers.mean().item()})
    agree(row, {"update_ratio": 0.1 * g.sum(0).norm().item() / layer.bias.detach().norm().item()})
    assert "learning rate" not in row.reason


def test_inputs_of_zero_whose_bias_moves_are_not_said_to_move_nothing() -> None:
    (row,) = ad.diagnose(nn.Linear(4, 3).double(), 0 * X, None, bent, lr=0.1).rows
    assert row.efficiency < 0
    assert "left its parameters as they were" not in row.reason


# The self-check in narrow numbers


class _Uses(nn.Module):
    """Its layer's weight is used a second time, by a function, on rows in another order."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(16, 8), twice

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.cat([z, F.linear(x.flip(0), self.layer.weight, self.layer.bias)], 1) if self.twice else z


NARROW: dict[str, tuple[torch.dtype, Any]] = {
    "float32": (torch.float32, nullcontext),
    "bfloat16": (torch.bfloat16, nullcontext),
    "float16": (torch.float16, nullcontext),
    "autocast": (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)),
}


@pytest.mark.parametrize("number", [4, 64, 4096])
@pytest.mark.parametrize("name", NARROW)
def test_a_second_use_of_a_weight_is_found_in_any_dtype_and_one_use_is_enough(name: str, number: int) -> None:
    dtype, context = NARROW[name]
    x, y = torch.randn(number, 16, dtype=dtype), torch.randn(number, 16)
    for twice in (False, True):
        model = _Uses(twice).to(dtype)
        with context():
            found = ad.diagnose(
                model, x, y, lambda z, y: (z.float() - y[:, : z.shape[1]]).square().mean(), lr=1e-2, rank=False, counterfactual=False
            )
        assert [check.ok for check in found.checks] == [not twice] * 2, found.checks
        assert ("only in part" in found.rows[0].reason) == twice


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_a_bias_before_a_batch_normalisation_whose_gradient_is_rounding_passes(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 3)).to(dtype)
    x = torch.randn(16, 3, 9, 9, dtype=dtype)
    found = ad.diagnose(model, x, None, bent, rank=False, counterfactual=False)
    assert {check.parameter: check.ok for check in found.checks} == {f"{n}.{p}": True for n in (0, 2) for p in ("weight", "bias")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(x)).backward()
        optimizer.step()
    assert monitor.last is not None
    assert all(check.ok for check in monitor.last.checks)


# What include takes


def test_include_without_a_pattern_or_of_another_type_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match="no pattern"):
        ad.diagnose(model, X, None, bent, include=[])
    for wrong in (5, ["*", 3], {"0"}):
        with pytest.raises(TypeError, match="include must be"):
            ad.diagnose(model, X, None, bent, include=wrong)  # type: ignore[arg-type]


def test_a_shared_module_is_included_by_either_name() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2)).double()
    first, second = (ad.diagnose(model, X, None, bent, include=name) for name in ("0", "2"))
    assert [(row.module, row.call) for row in second.rows] == [("0", 0), ("0", 1)]
    assert repr(first.rows) == repr(second.rows)
    assert statuses(second)["3"] == ("skipped", "not in include")
