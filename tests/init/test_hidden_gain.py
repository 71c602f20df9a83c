# hidden_gain_: which layers are hidden, what is set, and that signals then have the scale of the plain network.
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import affine_divergence as ad
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear, PatchNormConv2d, PatchNormConvTranspose2d, SampleCorrectedLinear


def test_only_structural_layers_between_the_ends_get_the_gain() -> None:
    model = nn.Sequential(
        PatchNormConv2d(3, 8, 3, gain=5.0),
        PatchNormConv2d(8, 6, 3, groups=2, form="norm-like"),
        PatchNormConvTranspose2d(6, 4, 4, stride=2),
        SampleCorrectedLinear(4, 4),
        NormLikeLinear(4, 4),
        AffineLikeLinear(4, 2, gain=5.0),
    )
    assert ad.init.hidden_gain_(model) is model
    gains = [getattr(layer, "gain", None) for layer in model]
    assert gains == [1.0, math.sqrt(37), math.sqrt(25), None, math.sqrt(5), 1.0]  # 8/2·9, 6·16/4


def test_plain_ends_leave_every_structural_layer_hidden() -> None:
    model = ad.init.hidden_gain_(nn.Sequential(nn.Linear(9, 8), AffineLikeLinear(8, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    assert model[1].gain == 3.0


def test_weights_and_random_numbers_stay() -> None:
    model = nn.Sequential(*(AffineLikeLinear(4, 4) for _ in range(3)))
    before, random = [layer.weight.clone() for layer in model], torch.random.get_rng_state()
    ad.init.hidden_gain_(model)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), random)


def test_biases_of_structural_layers_become_zero() -> None:
    model = ad.init.hidden_gain_(nn.Sequential(nn.Linear(4, 4), AffineLikeLinear(4, 4), NormLikeLinear(4, 4, bias=False)))
    assert model[0].bias.any()
    assert not model[1].bias.any()
    assert model[2].bias is None


def test_gains_are_not_in_a_state_dict_and_survive_loading_one() -> None:
    model, anew = (nn.Sequential(*(AffineLikeLinear(3, 3) for _ in range(3))) for _ in range(2))
    ad.init.hidden_gain_(model)
    anew.load_state_dict(model.state_dict())
    assert anew[1].gain == 1.0
    model.load_state_dict(anew.state_dict())
    assert model[1].gain == 2.0


def test_deep_signals_stay_of_the_order_of_the_first_and_not_at_gain_one() -> None:
    torch.manual_seed(0)
    parts = [part for _ in range(12) for part in (AffineLikeLinear(256, 256, bias=False), nn.Tanh())]
    model, x = nn.Sequential(*parts), torch.randn(64, 256)
    at_one = model(x).square().mean().item()
    assert at_one < 1e-6
    assert 0.1 < ad.init.hidden_gain_(model)[:-2](x).square().mean().item() < 0.5  # torch's weights: about 1/3


@pytest.mark.parametrize("model", [nn.Linear(3, 2), nn.Sequential(nn.Tanh()), SampleCorrectedLinear(3, 2)])
def test_models_without_a_gain_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="has no AffineLikeLinear, NormLikeLinear or PatchNormConv layer whose gain could be set"):
        ad.init.hidden_gain_(model)
