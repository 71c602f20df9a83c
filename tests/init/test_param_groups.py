# param_groups: rates by their formulas, every parameter once, and trajectories that equal those of the plain twin where they can.
from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.nn import (
    AffineLikeLinear,
    BatchCorrectedLinear,
    NormLikeLinear,
    PatchNormConv2d,
    PatchNormConvTranspose2d,
    SampleCorrectedConv2d,
    SampleCorrectedLinear,
)

LR = 0.1


def _rate(model: nn.Module, name: str, **options: Any) -> float:
    parameter = dict(model.named_parameters())[name]
    (rate,) = [group["lr"] for group in ad.param_groups(model, LR, **options) if any(p is parameter for p in group["params"])]
    return rate


def _frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


LAYERS: dict[str, tuple[Any, float, float]] = {
    "affine-like": (lambda: AffineLikeLinear(8, 3, gain=2.0), 9 / 4, math.sqrt(9 / 4)),
    "affine-like-no-bias": (lambda: AffineLikeLinear(8, 3, bias=False), 9, 3),
    "affine-like-auto": (lambda: AffineLikeLinear(8, 3, gain="auto"), 1, 1),
    "affine-like-frozen-weight": (lambda: _frozen(AffineLikeLinear(8, 3), "weight"), 9, 3),
    "norm-like": (lambda: NormLikeLinear(8, 3, gain=2.0), 9 / 8, math.sqrt(9 / 8)),
    "norm-like-no-bias": (lambda: NormLikeLinear(8, 3, bias=False), 8, math.sqrt(8)),
    "norm-like-frozen-weight": (lambda: _frozen(NormLikeLinear(8, 3, gain=2.0), "weight"), 1 / 4, 1 / 2),
    "norm-like-frozen-bias": (lambda: _frozen(NormLikeLinear(8, 3), "bias"), 8, math.sqrt(8)),
    "sample": (lambda: SampleCorrectedLinear(8, 3), 9, 1),
    "sample-no-bias": (lambda: SampleCorrectedLinear(8, 3, bias=False), 8, 1),
    "sample-frozen-weight": (lambda: _frozen(SampleCorrectedLinear(8, 3), "weight"), 1, 1),
    "patch-norm": (lambda: PatchNormConv2d(4, 6, 3, groups=2, gain=2.0), 19 / 4, math.sqrt(19 / 4)),
    "patch-norm-transposed": (lambda: PatchNormConvTranspose2d(4, 6, 4, stride=2), 17, math.sqrt(17)),
    "sample-conv": (lambda: SampleCorrectedConv2d(2, 6, 2), 9, 1),
    "batch": (lambda: BatchCorrectedLinear(8, 3), 1, 1),
    "plain": (lambda: nn.Linear(8, 3), 1, 1),
    "all-frozen": (lambda: _frozen(AffineLikeLinear(8, 3, bias=False), "weight"), 1, 1),
}


@pytest.mark.parametrize(("make", "sgd", "adam"), LAYERS.values(), ids=LAYERS)
def test_rates_are_those_of_inputs_of_unit_mean_square(make: Any, sgd: float, adam: float) -> None:
    model = nn.Sequential(make())
    assert _rate(model, "0.weight") == pytest.approx(LR * sgd, rel=1e-6)
    for optimizer in (torch.optim.AdamW, torch.optim.Adam(model.parameters())):
        assert _rate(model, "0.weight", optimizer=optimizer) == pytest.approx(LR * adam, rel=1e-6)


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
@pytest.mark.parametrize("name", ["affine-like", "affine-like-no-bias", "norm-like", "norm-like-frozen-weight", "sample"])
def test_rates_equal_the_measured_ones_on_rows_of_unit_mean_square(name: str, optimizer: Any) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    x = x * (8 / x.square().sum(1, keepdim=True)).sqrt()
    model = LAYERS[name][0]().double()
    assert _rate(model, "weight", optimizer=optimizer) == pytest.approx(ad.matching_lr(model, x, LR, optimizer=optimizer), rel=1e-10)


def _trained(model: nn.Module, groups: Any, x: Tensor, target: Tensor, **options: Any) -> Tensor:
    optimizer = torch.optim.SGD(groups, lr=LR, **options)
    for _ in range(20):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    return model(x)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gain_and_rate_trade_exactly_over_a_trajectory(momentum: float) -> None:
    # (gain g, weights W, rate η) and (1, g W, g² η), layer by layer, in a network of unequal fan-ins.
    hidden = (AffineLikeLinear(12, 5, gain=3.0), nn.Tanh(), NormLikeLinear(5, 4, gain=0.5), nn.Tanh())
    first = nn.Sequential(*hidden, AffineLikeLinear(4, 2)).double()
    second = copy.deepcopy(first)
    with torch.no_grad():
        for layer in second[::2]:
            for parameter in layer.parameters():
                parameter *= layer.gain
            layer.gain = 1.0
    x, target = torch.randn(7, 12).double(), torch.randn(7, 2).double()
    outputs = [_trained(model, ad.param_groups(model, 0.01), x, target, momentum=momentum) for model in (first, second)]
    assert torch.allclose(*outputs, rtol=1e-9)


def test_one_layer_on_unit_rows_steps_exactly_like_its_plain_twin() -> None:
    x = torch.randn(1, 8, dtype=torch.float64)
    x = x * (8 / x.square().sum()).sqrt()
    layer = AffineLikeLinear(8, 3, gain="auto").double()
    plain = nn.Linear(8, 3).double()
    plain.load_state_dict(layer.state_dict())
    target = torch.randn(1, 3, dtype=torch.float64)
    wanted = _trained(plain, plain.parameters(), x, target)
    assert torch.allclose(_trained(layer, ad.param_groups(layer, LR), x, target), wanted, rtol=1e-10)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.narrow, self.wide = nn.Embedding(6, 4), AffineLikeLinear(4, 6), AffineLikeLinear(4, 6, gain=0.5)
        self.head, self.scale = AffineLikeLinear(6, 6), nn.Parameter(torch.ones(()))
        self.narrow.weight = self.words.weight
        self.wide.bias = self.narrow.bias


def test_every_parameter_is_in_one_group_and_shared_ones_at_the_lowest_rate() -> None:
    model = _frozen(_Tied(), "scale")
    groups = ad.param_groups(model, LR)
    listed = [p for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 6
    assert set(listed) == set(model.parameters())
    assert len({group["lr"] for group in groups}) == len(groups)
    assert _rate(model, "words.weight") == LR
    assert _rate(model, "narrow.bias") == pytest.approx(5 * LR)
    assert _rate(model, "wide.weight") == pytest.approx(20 * LR)
    assert _rate(model, "scale") == LR
    torch.optim.SGD(groups, lr=LR)


def test_parametrised_layers_keep_their_rate_and_their_state() -> None:
    model = nn.utils.parametrizations.spectral_norm(AffineLikeLinear(8, 3))
    state = copy.deepcopy(model.state_dict())
    assert _rate(model, "parametrizations.weight.original") == pytest.approx(9 * LR)
    assert _rate(model, "bias") == pytest.approx(9 * LR)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_plain_model_is_one_group_at_the_rate_given() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    assert ad.param_groups(model, 1 / 3) == [{"params": list(model.parameters()), "lr": 1 / 3}]
    assert ad.param_groups(nn.Tanh(), LR) == []


@pytest.mark.parametrize(
    ("model", "lr", "options", "error", "message"),
    [
        (lambda x: x, LR, {}, TypeError, r"expected a torch\.nn\.Module, got function"),
        (AffineLikeLinear(2, 2), "0.1", {}, TypeError, "lr must be a number, got str"),
        (AffineLikeLinear(2, 2), 0.0, {}, ValueError, "lr must be positive and finite, got 0.0"),
        (AffineLikeLinear(2, 2), LR, {"optimizer": torch.optim.LBFGS}, ValueError, "no matching rate is known for LBFGS"),
        (nn.LazyLinear(2), LR, {}, ValueError, "weight is lazy and has no shape yet"),
    ],
)
def test_bad_arguments_are_refused(model: Any, lr: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ad.param_groups(model, lr, **options)
