# Numbers that are not finite: no measure of such rows has a value, least of all the ideal one, and the reason is told.
from __future__ import annotations

import math

import pytest
import torch
from diagnosis_cases import Mlp, bent, rows, sgd
from torch import nn

import affine_divergence as ad
from affine_divergence.diagnostics import _measures
from affine_divergence.diagnostics._measures import SUMMARY, Moved, RowSums, summary
from affine_divergence.diagnostics._scatter import scatter_figure

X = rows(6, 5)
SPOILT = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


def _spoilt(value: float) -> nn.Module:
    model = Mlp(inplace=False).double()
    with torch.no_grad():
        model.second.weight[0, 0] = value
    return model


def _wanting(one: object, *names: str) -> list[str]:
    """Those that have a value."""
    return [name for name in (*SUMMARY, *names) if not math.isnan(getattr(one, name))]


@SPOILT
def test_one_weight_that_is_not_finite_leaves_no_measure_of_its_layer_or_of_those_before(value: float) -> None:
    found = ad.diagnose(_spoilt(value), X, None, bent, lr=0.1)
    assert [(row.module, row.verdict) for row in found.rows] == [("first", "broken"), ("second", "broken")]
    plain = [f"{name}_plain" for name in SUMMARY]
    for row in found.rows:
        assert not _wanting(row, *plain, "interference", "update_ratio", "update_ratio_plain")
        assert "not finite" in row.reason


@SPOILT
def test_the_lines_of_the_corrections_have_no_number_and_say_why(value: float) -> None:
    found = ad.diagnose(_spoilt(value), X, None, bent, lr=0.1)
    assert len(found.counterfactual) == 10
    for line in found.counterfactual:
        assert not _wanting(line, "interference"), line
        assert line.reason == "inputs or gradients are not finite"


@SPOILT
def test_a_tracker_is_told_of_broken_layers_and_of_no_share(value: float) -> None:
    model, told = _spoilt(value), []
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1, tracker=lambda values, step: told.append(dict(values))):
        bent(model(X)).backward()
        optimizer.step()
    assert told == [{"affine_divergence/layers_look": 0.0, "affine_divergence/layers_broken": 2.0}]


@SPOILT
@pytest.mark.parametrize("monitored", [False, True])
def test_the_self_check_says_that_numbers_are_not_finite_and_suspects_nobody(value: float, monitored: bool) -> None:
    model = _spoilt(value)
    if monitored:
        optimizer = sgd(model)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            bent(model(X)).backward()
            optimizer.step()
        assert monitor.last is not None
        checks = monitor.last.checks
    else:
        checks = ad.diagnose(model, X, None, bent, lr=0.1).checks
    assert len(checks) == 4
    for check in checks:
        assert not check.ok
        assert "not finite" in check.reason
        assert "no hook sees" not in check.reason


def test_gradients_without_end_have_no_share_uphill_and_pass_no_self_check() -> None:
    layer = nn.Linear(5, 3)
    optimizer = sgd(layer)
    with ad.Monitor(layer, optimizer, every=1) as monitor:
        (1e38 * (1e10 * layer(X.float()))).sum().backward()
        optimizer.step()
    assert monitor.last is not None
    assert math.isnan(monitor.last.rows[0].below_zero)
    assert [check.ok for check in monitor.last.checks] == [False, False]


def test_the_step_of_an_infinite_weight_is_no_step_of_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[0] = -math.inf  # behind a ReLU all else is finite, the gradients too
    found = ad.diagnose(model, X.abs(), None, bent, lr=0.1)
    first, second = found.rows
    assert found.loss is not None
    assert math.isfinite(found.loss.before)
    assert math.isnan(first.update_ratio_plain)
    assert math.isfinite(second.update_ratio_plain)


def test_the_rank_of_finite_inputs_is_there_whatever_the_weights_are() -> None:
    first = ad.diagnose(_spoilt(math.nan), X, None, bent, lr=0.1).rows[0]
    augmented = torch.cat([X, torch.ones(6, 1)], 1)
    assert first.rank == torch.linalg.matrix_rank(augmented).item()
    spoilt = X.clone()
    spoilt[0, 0] = math.nan
    assert ad.diagnose(Mlp().double(), spoilt, None, bent, lr=0.1).rows[0].rank is None


# Some rows of a call


def _tokens() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[2] = math.nan
    return model


TOKENS = torch.tensor([0, 1, 2, 3, 4, 5])


def test_of_a_call_with_one_such_row_nothing_is_said_and_its_other_rows_are_shown() -> None:
    found = ad.diagnose(_tokens(), TOKENS, None, lambda z: z.square().mean(), lr=0.1)
    row = found.rows[0]
    assert (row.module, row.rows, row.masked, row.verdict) == ("0", 6, 0, "broken")
    assert not _wanting(row, "interference")
    samples = next(one for one in found.samples if one.module == "0")
    for values in (samples.multiplier, samples.alignment, samples.gradient):
        assert [math.isnan(value) for value in values] == [False, False, True, False, False, False]


def test_a_scatter_tells_rows_that_are_not_finite_from_those_without_a_gradient() -> None:
    found = ad.diagnose(_tokens(), TOKENS, None, lambda z: (z * torch.arange(6).unsqueeze(1)).square().mean(), lr=0.1)
    samples = next(one for one in found.samples if one.module == "0")
    (axes,) = (axes for axes in scatter_figure(samples).axes if axes.get_title(loc="left"))
    assert "6 rows, 1 without a gradient left out, 1 not finite left out" in axes.get_title(loc="left")


def test_rows_that_are_not_finite_take_the_place_of_no_extreme_one() -> None:
    tokens = torch.arange(6000)
    model = nn.Embedding(6000, 3).double()
    with torch.no_grad():
        model.weight[::2] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = torch.ones(6000, 3, dtype=torch.float64)
    before[4321] = 1000.0  # of which the momentum still moves the row
    (model(tokens).nan_to_num() * before).sum().backward()
    optimizer.step()
    (samples,) = ad.diagnose(model, tokens, None, lambda z: z.sum(), optimizer=optimizer).samples
    assert len(samples.index) < 6000
    assert samples.multiplier[samples.index.index(4321)] == pytest.approx(0.9 * 1000 + 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_share_of_rows_one_of_which_is_not_finite_is_not_known_on_a_device_either(
    monkeypatch: pytest.MonkeyPatch, value: float, masked: bool
) -> None:
    dot = torch.tensor([-1.0, value, 2.0, -3.0], dtype=torch.float64)
    used = torch.tensor([True, not masked, True, True])
    gg, square = torch.ones(4, dtype=torch.float64), dot.square()
    sums = RowSums(gg, used, gg, (), None, None)
    compact = summary(sums, Moved(dot, square), 0.1).below_zero.item()
    monkeypatch.setattr(_measures, "_without_masked", lambda sums, moved: (sums.gg, moved, sums.used))
    counted = summary(sums, Moved(dot, square), 0.1).below_zero.item()
    if masked:
        assert compact == counted == 1 / 3
    else:
        assert math.isnan(compact)
        assert math.isnan(counted)


# Finite, and easily taken for what is not


def test_rows_of_zeros_that_a_weight_decay_moves_nowhere_are_not_broken() -> None:
    layer = nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
    (row,) = ad.diagnose(layer, torch.zeros(4, 5), None, lambda z: (z - 1).square().sum(), optimizer=optimizer).rows
    assert row.update_ratio == pytest.approx(0.01, rel=1e-5)
    assert row.verdict == "look"
    assert "moves none of its rows" in row.reason


def test_the_alone_rate_of_a_sample_corrected_row_that_is_not_finite_is_not_known() -> None:
    x = X.clone()
    x[1:] = math.nan
    (row,) = ad.diagnose(ad.nn.SampleCorrectedLinear(5, 3).double(), x, None, bent, lr=0.1).rows
    assert math.isnan(row.self_term_median)
    assert math.isnan(row.self_term_p5)


@pytest.mark.parametrize("seed", range(20))
def test_an_efficiency_is_a_cosine_in_float32_too(seed: int) -> None:
    torch.manual_seed(seed)
    found = ad.diagnose(nn.Linear(7, 5), torch.randn(1, 7), None, lambda z: z.square().sum(), lr=1e-3)
    (row,) = found.rows
    for value in (row.efficiency, row.efficiency_plain, *(line.efficiency for line in found.counterfactual if line.kind != "batch")):
        assert value == pytest.approx(-1.0, abs=1e-5)
        assert value >= -1.0
