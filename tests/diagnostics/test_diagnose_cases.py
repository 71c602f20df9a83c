# What breaks in such tools and is measured here: checkpoints, scales, precision, masked rows, shared parts, hooks of the user's.
from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from diagnosis_cases import Attends, Mlp, against_the_oracle, agree, bent, convnet, rows, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import affine_divergence as ad

X = rows(6, 5)


# Checkpoints


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_seen_once_with_the_oracles_numbers(reentrant: bool) -> None:
    model = _Checkpointed(reentrant=reentrant).double()
    twin = copy.deepcopy(model)
    twin.reentrant = None
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    assert all(line.calls == line.fired == 1 for line in found.coverage)
    against_the_oracle(found, twin, lambda m: bent(m(X)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_monitor_sees_checkpointed_layers_once(reentrant: bool) -> None:
    model = _Checkpointed(reentrant=reentrant).double()
    optimizer = sgd(model)
    twin = copy.deepcopy(model)
    twin.reentrant = None
    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(twin, of_twin := sgd(twin), every=1) as plain:
        for one, its in ((model, optimizer), (twin, of_twin)):
            bent(one(X)).backward()
            its.step()
    assert monitor.last is not None
    assert plain.last is not None
    others = {row.module: row for row in plain.last.rows}
    assert {row.module for row in monitor.last.rows} == others.keys()
    for row in monitor.last.rows:
        agree(row, {name: value for name, value in vars(others[row.module]).items() if isinstance(value, float)})


# Scales and precision


def test_mean_and_sum_losses_have_the_same_ratios() -> None:
    model = Mlp().double()
    y = torch.arange(6) % 4
    mean, total = (
        ad.diagnose(model, X, y, lambda z, y, r=reduction: F.cross_entropy(z, y, reduction=r), lr=0.01) for reduction in ("mean", "sum")
    )
    for row, other in zip(mean.rows, total.rows, strict=True):
        ratios = ("multiplier_", "alignment", "below", "interference", "rank", "efficiency", "self_term")
        agree(row, {name: value for name, value in vars(other).items() if name.startswith(ratios)})
        assert row.update_ratio == pytest.approx(other.update_ratio / 6, rel=1e-9)


def test_ignored_labels_are_masked_rows_and_the_mean_over_the_rest_changes_no_ratio() -> None:
    model = Mlp().double()
    y = torch.tensor([1, -100, 2, -100, 0, 3])
    with_ignored = ad.diagnose(model, X, y, F.cross_entropy)
    without = ad.diagnose(model, X[y >= 0], y[y >= 0], F.cross_entropy)
    for row, other in zip(with_ignored.rows, without.rows, strict=True):
        assert (row.rows, row.masked) == (other.rows, other.masked + 2)
        agree(row, {name: value for name, value in vars(other).items() if isinstance(value, float)})


def test_a_layer_all_of_whose_rows_are_masked_is_no_crash_and_no_zeros() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)  # all dead
    found = ad.diagnose(model, X, None, bent)
    assert {row.module for row in found.rows} == {"0", "2"}
    dead = next(row for row in found.rows if row.module == "0")
    assert (dead.rows, dead.masked) == (0, 6)
    assert math.isnan(dead.multiplier_median)
    assert math.isnan(dead.alignment_median)
    str(found)


def test_bfloat16_autocast_agrees_with_float32_within_its_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(12, 16)
    wide = ad.diagnose(model, x, None, bent, lr=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = ad.diagnose(model, x, None, bent, lr=0.01)
    for row, other in zip(narrow.rows, wide.rows, strict=True):
        for name in ("multiplier_median", "alignment_median", "interference", "efficiency", "self_term_median", "multiplier_median_plain"):
            assert getattr(row, name) == pytest.approx(getattr(other, name), rel=0.05), name
    assert narrow.rows[0].multiplier_median != wide.rows[0].multiplier_median


def test_a_bfloat16_model_is_measured_in_wider_numbers() -> None:
    # A learning rate whose steps bfloat16 weights can just hold: 1 + 2**-9 is 1, and so is the step; the plain column does not round.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(12, 300)
    wide = ad.diagnose(copy.deepcopy(model), x, None, bent, lr=0.01, counterfactual=False)
    narrow = ad.diagnose(model.bfloat16(), x.bfloat16(), None, bent, lr=0.01, counterfactual=False)
    for row, other in zip(narrow.rows, wide.rows, strict=True):
        assert row.self_term_median == pytest.approx(other.self_term_median, rel=0.01)
        assert row.multiplier_median_plain == pytest.approx(other.multiplier_median_plain, rel=0.05)
        assert row.interference == pytest.approx(other.interference, rel=0.1)


def test_rows_of_zeros_are_rows() -> None:
    x = torch.cat([X, torch.zeros(2, 5, dtype=X.dtype)])
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh()).double()
    found = ad.diagnose(model, x, None, bent, lr=0.05)
    against_the_oracle(found, copy.deepcopy(model), lambda m: bent(m(x)))
    assert found.rows[0].rows == 8
    assert found.rows[0].self_term_p5 == 0.0


def test_infinite_rows_are_told_and_stop_nothing() -> None:
    x = X.clone()
    x[0, 0] = math.inf
    found = ad.diagnose(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double(), x, None, bent, lr=0.05)
    assert any(row.verdict == "broken" for row in found.rows)
    str(found)


# Shared parts


def test_a_module_under_two_names_is_measured_under_one() -> None:
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer).double()
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    assert [(row.module, row.call) for row in found.rows] == [("0", 0), ("0", 1)]
    against_the_oracle(found, copy.deepcopy(model), lambda m: bent(m(X)))


def test_two_layers_that_share_a_weight_move_each_others_rows() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
        model[2].weight = model[0].weight
        return model

    model = make()
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    against_the_oracle(found, copy.deepcopy(model), lambda m: bent(m(X)))
    assert all(check.ok and check.error < 1e-9 for check in found.checks)


def test_the_self_check_of_plain_descent_is_exact() -> None:
    model = convnet().double()
    found = ad.diagnose(model, rows(2, 4, 6, 5), None, bent)
    checks = {check.parameter: check for check in found.checks}
    assert checks.keys() == {f"{n}.{p}" for n in ("0", "3", "5") for p in ("weight", "bias")}
    assert all(check.ok for check in checks.values())
    del checks["0.bias"]  # before a batch normalisation: its gradient is what the sum rounds to, and no error either
    assert all(check.error < 1e-12 and check.cosine == pytest.approx(1, abs=1e-12) for check in checks.values())


def test_in_float32_no_check_fails_for_its_rounding() -> None:
    torch.manual_seed(0)
    for make, x in ((convnet, rows(40, 4, 6, 5)), (Attends, rows(9, 40, 4))):
        found = ad.diagnose(make(), x.float(), None, bent)
        assert all(check.ok for check in found.checks), found.checks


def test_a_gradient_that_the_rows_do_not_explain_is_not_ok() -> None:
    model = Mlp().double()

    def loss(z: Tensor) -> Tensor:
        return bent(z) + model.first.weight.square().sum()  # a penalty that no row of the layer knows of

    found = ad.diagnose(model, X, None, loss)
    checks = {check.parameter: check.ok for check in found.checks}
    assert checks == {"first.weight": False, "first.bias": True, "second.weight": True, "second.bias": True}


def test_a_model_that_was_diagnosed_is_let_go() -> None:
    model = Mlp().double()
    seen = weakref.ref(model)
    found = ad.diagnose(model, X, None, bent)
    del model
    gc.collect()
    assert seen() is None
    assert found.rows


def test_a_hook_of_the_users_that_changes_the_output_is_not_taken_for_the_layers() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).double()
    plain = nn.Sequential(copy.deepcopy(model[0]), _Halves(), nn.Tanh())
    handle = model[0].register_forward_hook(lambda module, args, z: z / 2)
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    handle.remove()
    against_the_oracle(found, plain, lambda m: bent(m(X)))


class _Halves(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z / 2


def test_a_dead_layer_with_a_penalty_on_its_weight_is_not_ok() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)
    found = ad.diagnose(model, X, None, lambda z: bent(z) + model[0].weight.square().sum())
    checks = {check.parameter: check.ok for check in found.checks}
    assert checks == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}


class _Slope(nn.Module):
    """Differentiates in its forward, and makes nothing of what it finds."""

    def __init__(self, *, differentiates: bool) -> None:
        super().__init__()
        self.body, self.differentiates = Mlp(inplace=False), differentiates

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        z: Tensor = self.body(x)
        if self.differentiates:
            z = z + 0 * torch.autograd.grad(z.tanh().sum(), x, create_graph=True)[0].sum()
        return z


def test_a_gradient_taken_in_the_forward_is_not_that_of_the_loss() -> None:
    model, twin = _Slope(differentiates=True).double(), _Slope(differentiates=False).double()
    twin.load_state_dict(model.state_dict())
    found = ad.diagnose(model, X, None, bent, lr=0.05)
    against_the_oracle(found, twin, lambda m: bent(m(X)))
    assert all(check.ok for check in found.checks)
