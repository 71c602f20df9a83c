# calibrate_: mean squares after it, on architectures that are no chain; what is left alone, what is left as it was, what is refused.
from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import affine_divergence as ad
from affine_divergence.init._moments import second_moment
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear, PatchNormConv2d, SampleCorrectedConv2d, SampleCorrectedLinear


def _outputs(model: nn.Module, *inputs: Any) -> dict[str, list[Tensor]]:
    """The outputs of every layer, by name, of one more forward."""
    found: dict[str, list[Tensor]] = {}
    handles = [
        layer.register_forward_hook(lambda _, args, z, name=name: found.setdefault(name, []).append(z.detach().double()))
        for name, layer in model.named_modules()
        if hasattr(layer, "weight")
    ]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return found


def _mean_square(outputs: list[Tensor]) -> float:
    return torch.cat([z.flatten() for z in outputs]).square().mean().item()


def _mlp() -> nn.Sequential:
    layers = (AffineLikeLinear(30, 80), nn.Linear(80, 40), NormLikeLinear(40, 60, gain=3.0), SampleCorrectedLinear(60, 5))
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))[:-1]


def test_hidden_rows_and_the_output_have_the_signal_exactly_or_by_theory() -> None:
    model, x = _mlp(), 7.0 * torch.randn(100, 30)
    report = ad.init.calibrate_(model, x, signal=4.0)
    outputs = _outputs(model, x)
    for name, n in (("0", 80), ("2", 40), ("4", 60)):  # the mean square of n activations
        assert n * second_moment(_mean_square(outputs[name]), "tanh") == pytest.approx(4.0, rel=1e-5)
        rows = outputs[name][0].tanh().square().sum(1).mean().item()
        assert rows == pytest.approx(4.0, rel=0.05)
    assert outputs["6"][0].square().sum(1).mean().item() == pytest.approx(4.0, rel=1e-5)
    assert [row.module for row in report.rows] == ["0", "2", "4", "6"]


def test_factors_of_the_report_are_those_applied_to_weight_and_bias() -> None:
    model, x = _mlp().double(), torch.randn(50, 30, dtype=torch.float64)
    before, first = copy.deepcopy(model), _outputs(model, x)
    report = ad.init.calibrate_(model, x)
    after = _outputs(model, x)
    for row in report.rows:
        old, new = before.get_submodule(row.module), model.get_submodule(row.module)
        assert torch.allclose(new.weight, row.factor * old.weight, rtol=1e-14)
        assert torch.allclose(new.bias, row.factor * old.bias, rtol=1e-14)
        assert row.before == pytest.approx(_mean_square(first[row.module]), rel=1e-10)
        assert row.after == pytest.approx(_mean_square(after[row.module]), rel=1e-10)
        assert row.after == pytest.approx(row.target, rel=1e-10)


def test_a_second_calibration_changes_nothing() -> None:
    model, x = _mlp().double(), torch.randn(50, 30, dtype=torch.float64)
    ad.init.calibrate_(model, x)
    assert [row.factor for row in ad.init.calibrate_(model, x).rows] == pytest.approx([1.0] * 4, rel=1e-12)


def test_patches_of_convolutions_have_the_signal() -> None:
    first, second = PatchNormConv2d(3, 64, 5), SampleCorrectedConv2d(64, 256, 3, groups=2)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(inplace=True), nn.Conv2d(256, 4, 2))
    x, patches = torch.randn(8, 3, 12, 12), {}
    ad.init.calibrate_(model, x, signal=2.0, nonlinearity="relu")
    for at, options in ((2, {"kernel_size": 3, "groups": 2}), (4, {"kernel_size": 2})):
        with torch.no_grad():
            patches[at] = ad.functional.patch_sqnorm(model[:at](x), **options).mean().item()
    assert list(patches.values()) == pytest.approx([2.0, 2.0], rel=0.25)  # a share of channels of one draw is positive everywhere
    assert model(x).square().sum(1).mean().item() == pytest.approx(2.0, rel=1e-4)


class _Odd(nn.Module):
    """Registered in another order than called, a residual stream, a layer that normalises, keyword inputs, dropout, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.second, self.first = nn.Linear(16, 3), AffineLikeLinear(16, 16), AffineLikeLinear(16, 16)
        self.embed, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        h = self.embed(scale * x)
        for layer in (self.first, self.second):
            h = h + layer(self.drop(self.norm(h))).tanh()
            self.seen += 1
        z: Tensor = self.head(h)
        return z


@pytest.mark.parametrize("training", [True, False])
def test_order_of_calls_decides_and_everything_else_is_left_as_it_was(training: bool) -> None:
    model = _Odd().train(training)
    model.head.eval()
    flags = {name: module.training for name, module in model.named_modules()}
    state, random, model.first.bias.grad = copy.deepcopy(model.state_dict()), torch.random.get_rng_state(), torch.ones(16)
    report = ad.init.calibrate_(model, {"x": torch.arange(80.0).view(10, 8), "scale": 0.1})
    assert [row.module for row in report.rows] == ["embed", "first", "second", "head"]
    assert torch.equal(torch.random.get_rng_state(), random)
    assert {name: module.training for name, module in model.named_modules()} == flags
    for name, value in model.state_dict().items():
        layer, _, kind = name.partition(".")
        scaled = [row.factor for row in report.rows if row.module == layer] or [1.0]
        assert torch.allclose(value.double(), scaled[0] * state[name].double(), rtol=1e-6), kind
    assert torch.equal(model.first.bias.grad, torch.ones(16))
    assert not any(module._forward_hooks for module in model.modules())


def test_random_numbers_of_every_pass_are_those_of_the_next_forward() -> None:
    model, x = nn.Sequential(AffineLikeLinear(8, 50), nn.Dropout(), AffineLikeLinear(50, 4)).double(), torch.randn(9, 8).double()
    state = torch.random.get_rng_state()
    report = ad.init.calibrate_(model, x)
    torch.random.set_rng_state(state)
    assert _mean_square(_outputs(model, x)["2"]) == pytest.approx(report.rows[1].target, rel=1e-10)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = AffineLikeLinear(12, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h = self.cell(torch.cat([step, h], 1)).tanh()
        z: Tensor = self.head(h)
        return z


def test_a_reused_layer_has_the_mean_over_its_calls() -> None:
    model, x = _Recurrent(), torch.randn(64, 6, 4)
    report = ad.init.calibrate_(model, x)
    cell, head = report.rows
    assert (cell.module, cell.note, head.note) == ("cell", "6 calls", "")
    assert _mean_square(_outputs(model, x)["cell"]) == pytest.approx(cell.target, rel=0.01)
    assert _mean_square(_outputs(model, x)["head"]) == pytest.approx(head.target, rel=1e-4)


def test_layers_that_share_a_weight_have_one_factor() -> None:
    layers, x = (AffineLikeLinear(6, 6), nn.Tanh(), AffineLikeLinear(6, 6), nn.Tanh(), nn.Linear(6, 6)), torch.randn(40, 6)
    model = nn.Sequential(*layers).double()
    model[2].weight = model[0].weight
    old = model[0].weight.clone()
    report = ad.init.calibrate_(model, x.double())
    first, second, _ = report.rows
    assert first.factor == second.factor
    assert torch.allclose(model[0].weight, first.factor * old)
    assert (first.after + second.after) / (first.target + second.target) == pytest.approx(1.0, rel=0.01)


def test_attention_and_layer_norm_models_are_calibrated_around_what_is_unknown() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(4, 5, 16)
    report = ad.init.calibrate_(layer, x, signal=16.0, nonlinearity="linear")
    assert [row.module for row in report.rows] == ["linear1", "linear2"]
    assert [row.after for row in report.rows] == pytest.approx([0.5, 1.0], rel=1e-5)  # 16 over 32 and 16 outputs


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(9, 6), AffineLikeLinear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        z: Tensor = self.head(self.hidden(self.words(tokens)).tanh())
        return z


LEFT: dict[str, tuple[Any, Any, str]] = {
    "frozen": (lambda: nn.Linear(4, 4).requires_grad_(False), torch.ones(3, 4), "frozen"),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), torch.ones(3, 4), "parametrised or pruned"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 1), torch.ones(3, 4), "parametrised or pruned"),
}


@pytest.mark.parametrize(("make", "x", "why"), LEFT.values(), ids=LEFT)
def test_what_cannot_be_scaled_is_left_alone_and_reported(make: Any, x: Tensor, why: str) -> None:
    model = nn.Sequential(make(), nn.Tanh(), AffineLikeLinear(4, 2))
    state = copy.deepcopy(model[0].state_dict())
    report = ad.init.calibrate_(model, x)
    assert [(row.module, row.note) for row in report.rows] == [("2", ""), ("0", f"left alone: {why}")]
    assert math.isnan(report.rows[1].factor)
    assert all(torch.equal(value, state[name]) for name, value in model[0].state_dict().items())
    with pytest.raises(ValueError, match=f"no linear or convolutional layer to calibrate; 0 is left alone: {why}"):
        ad.init.calibrate_(model[:2], x)


def test_a_weight_tied_to_an_embedding_is_left_alone() -> None:
    model = _Words()
    words = model.words.weight.clone()
    report = ad.init.calibrate_(model, torch.arange(9).view(3, 3))
    assert [(row.module, row.note) for row in report.rows] == [("hidden", ""), ("head", "left alone: shares a parameter with words")]
    assert torch.equal(model.words.weight, words)


def test_report_prints_a_line_for_each_layer() -> None:
    model = nn.Sequential(AffineLikeLinear(8, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), nn.Tanh(), NormLikeLinear(8, 2))
    header, *lines = str(ad.init.calibrate_(model, torch.randn(5, 8))).splitlines()
    assert header.split() == ["module", "type", "before", "after", "target", "factor"]
    assert [line.split()[:2] for line in lines] == [["0", "AffineLikeLinear"], ["4", "NormLikeLinear"], ["2", "Linear"]]
    assert lines[2].endswith("left alone: frozen")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_calibrated_within_rounding(dtype: torch.dtype) -> None:
    model = nn.Sequential(AffineLikeLinear(300, 64), nn.Tanh(), AffineLikeLinear(64, 4)).to(dtype)
    x = 200.0 * torch.ones(5, 300, dtype=dtype)
    report = ad.init.calibrate_(model, x)
    outputs = _outputs(model, x)
    assert model[0].weight.dtype is dtype
    assert [_mean_square(outputs[row.module]) / row.target for row in report.rows] == pytest.approx([1.0, 1.0], rel=0.02)


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.used(x)
        return z


def _zeros() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for parameter in model[1].parameters():
        nn.init.zeros_(parameter)
    return model


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "zero": (_zeros, torch.ones(3, 4), {}, r"all outputs of 1 \(Linear\) are zero on this batch"),
    "nan": (lambda: nn.Linear(4, 4), torch.full((3, 4), math.nan), {}, r"outputs of the module \(Linear\) are NaN or infinite"),
    "unused": (_Unused, torch.ones(3, 4), {}, r"not called on this batch: spare \(Linear\); .*freeze them"),
    "empty": (lambda: nn.Linear(4, 4), torch.ones(0, 4), {}, "was called on no rows"),
    "no-layer": (nn.Tanh, torch.ones(3, 4), {}, "Tanh has no linear or convolutional layer to calibrate$"),
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(3, 4), {"signal": 4.0}, r"signal must be below 3\.96"),
    "signal": (lambda: nn.Linear(4, 4), torch.ones(3, 4), {"signal": 0.0}, "signal must be positive and finite"),
    "nonlinearity": (lambda: nn.Linear(4, 4), torch.ones(3, 4), {"nonlinearity": "elu"}, "nonlinearity must be one of linear, tanh"),
    "lazy": (lambda: nn.LazyLinear(4), torch.ones(3, 4), {}, "is lazy and has no shape yet"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), torch.ones(3, 4), {}, "is on the device meta"),
}


@pytest.mark.parametrize(("make", "x", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_calibrated_is_refused_and_left_as_it_was(make: Any, x: Tensor, options: dict[str, Any], message: str) -> None:
    model = make()
    before = [p.detach().clone() for p in model.parameters()] if "lazy" not in message and "meta" not in message else []
    with pytest.raises(ValueError, match=message):
        ad.init.calibrate_(model, x, **options)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=False))
    assert not any(module._forward_hooks for module in model.modules())
