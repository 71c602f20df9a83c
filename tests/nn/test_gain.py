# gain="auto": √(fan_in + 1) for every structural layer, fan_in counted on the torch layer itself.
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from affine_divergence import nn as corrected
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear, PatchNormConv2d, PatchNormConvTranspose2d

CONVOLUTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("Conv1d", 1, {"kernel_size": 5, "padding": 2}),
    ("Conv2d", 2, {"kernel_size": (3, 2), "groups": 2}),
    ("Conv3d", 3, {"kernel_size": 3, "stride": 2, "dilation": 2}),
    ("ConvTranspose1d", 1, {"kernel_size": 3, "stride": 2}),
    ("ConvTranspose2d", 2, {"kernel_size": (4, 3), "stride": (2, 3), "groups": 2}),
    ("ConvTranspose3d", 3, {"kernel_size": 2, "stride": 1, "dilation": 2}),
]


@pytest.mark.parametrize("layer", [AffineLikeLinear, NormLikeLinear])
def test_auto_gain_of_a_linear_layer_counts_its_input_features(layer: Any) -> None:
    assert layer(8, 3, gain="auto").gain == 3.0
    assert layer(8, 3).gain == 1.0


@pytest.mark.parametrize(("name", "dims", "options"), CONVOLUTIONS, ids=[name for name, _, _ in CONVOLUTIONS])
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
def test_auto_gain_counts_the_inputs_that_reach_an_inner_output(name: str, dims: int, options: dict[str, Any], form: str) -> None:
    layer = getattr(corrected, f"PatchNorm{name}")(4, 6, form=form, gain="auto", **options)
    torch_layer = getattr(nn, name)(4, 6, bias=False, **options)
    nn.init.ones_(torch_layer.weight)
    reached = torch_layer(torch.ones(1, 4, *[20] * dims))[(0, 0, *[slice(7, 13)] * dims)]  # 6 positions: whole periods of strides 1, 2, 3
    assert layer.gain == pytest.approx(math.sqrt(reached.mean().item() + 1.0), rel=1e-6)
    assert type(layer.gain) is float


def test_auto_gain_draws_the_same_weights_as_gain_one() -> None:
    drawn = []
    for gain in (1.0, "auto"):
        torch.manual_seed(3)
        drawn.append(PatchNormConv2d(2, 3, 3, gain=gain).weight)
    assert torch.equal(*drawn)


@pytest.mark.parametrize(("layer", "sizes"), [(AffineLikeLinear, (3, 2)), (PatchNormConvTranspose2d, (3, 2, 3))])
def test_unknown_gain_names_the_valid_choices(layer: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r'gain must be a positive number or "auto".*got \'Auto\''):
        layer(*sizes, gain="Auto")
    with pytest.raises(ValueError, match="gain must be positive"):
        layer(*sizes, gain=0.0)
