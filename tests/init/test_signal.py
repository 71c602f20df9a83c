# signal_: the variance of every layer by its closed form, and that real networks keep the squared norm they were given.
from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor, nn
from torch.nn.utils import prune

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

ACTIVATIONS = {"linear": lambda z: z, "tanh": torch.tanh, "relu": torch.relu, "leaky_relu": nn.functional.leaky_relu}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rows(n: int, d: int, squared_norm: float) -> Tensor:
    x = torch.randn(n, d, dtype=torch.float64, generator=_generator(9))
    return x * (squared_norm / x.square().sum(1, keepdim=True)).sqrt()


LAYERS: dict[str, tuple[Any, Any]] = {
    "affine-like": (lambda: AffineLikeLinear(300, 400), lambda rho: rho / (1 + rho)),
    "affine-like-gain": (lambda: AffineLikeLinear(300, 400, gain=3.0), lambda rho: 9 * rho / (1 + rho)),
    "norm-like": (lambda: NormLikeLinear(300, 400, gain=0.5), lambda rho: 0.25),
    "norm-like-eps": (lambda: NormLikeLinear(300, 400, eps=0.7), lambda rho: rho / (rho + 0.7)),
    "plain": (lambda: nn.Linear(300, 400), lambda rho: rho),
    "sample": (lambda: SampleCorrectedLinear(300, 400), lambda rho: rho),
    "batch": (lambda: BatchCorrectedLinear(300, 400, bias=False), lambda rho: rho),
}
every_layer = pytest.mark.parametrize(("make", "share"), LAYERS.values(), ids=LAYERS)


@every_layer
def test_weight_variance_is_that_of_the_closed_form(make: Any, share: Any) -> None:
    layer = make().double()
    assert ad.init.signal_(layer, 2.0, nonlinearity="relu", input_signal=5.0, generator=_generator()) is layer
    expected = 2 * 2.0 / 400 / share(5.0)  # relu halves the mean square
    assert layer.weight.var().item() == pytest.approx(expected, rel=0.02)
    assert abs(layer.weight.mean().item()) < 0.02 * math.sqrt(expected)
    assert layer.bias is None or not layer.bias.any()


@pytest.mark.parametrize("nonlinearity", ACTIVATIONS)
@every_layer
def test_next_layers_rows_have_the_requested_squared_norm(make: Any, share: Any, nonlinearity: str) -> None:
    layer = ad.init.signal_(make().double(), 30.0, nonlinearity=nonlinearity, input_signal=5.0, generator=_generator())
    rows = ACTIVATIONS[nonlinearity](layer(_rows(500, 300, 5.0)))
    assert rows.square().sum(1).mean().item() == pytest.approx(30.0, rel=0.03)


def test_tanh_variance_solves_its_integral() -> None:
    layer = ad.init.signal_(AffineLikeLinear(1000, 200), 100.0, generator=_generator())  # mean squares of 1/2: far from linear
    q = layer.weight.double().var().item() * 100 / 101

    def density(zeta: float) -> float:
        return math.tanh(math.sqrt(q) * zeta) ** 2 * math.exp(-(zeta**2) / 2) / math.sqrt(2 * math.pi)

    assert 200 * quad(density, -10, 10)[0] == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("nonlinearity", ["tanh", "leaky_relu"])
@pytest.mark.parametrize("layer", [AffineLikeLinear, nn.Linear])
def test_deep_networks_keep_the_signal_at_every_depth(layer: Any, nonlinearity: str) -> None:
    widths = [1000, *[300, 500] * 4, 10]
    activation = {"tanh": nn.Tanh, "leaky_relu": nn.LeakyReLU}[nonlinearity]
    parts = [part for sizes in itertools.pairwise(widths) for part in (layer(*sizes), activation())][:-1]
    model = ad.init.signal_(nn.Sequential(*parts), 4.0, nonlinearity=nonlinearity, generator=_generator())
    x = torch.randn(200, 1000, generator=_generator(1))
    for part in model:
        x = part(x)
        if isinstance(part, activation):
            assert x.square().sum(1).mean().item() == pytest.approx(4.0, rel=0.25)  # fluctuations of one draw add up
    assert x.square().sum(1).mean().item() == pytest.approx(4.0, rel=0.8)  # ten outputs


def _conv_net() -> nn.Sequential:
    return nn.Sequential(
        PatchNormConv2d(3, 32, 5, stride=2),
        nn.Tanh(),
        SampleCorrectedConv2d(32, 64, 3, groups=2),
        nn.Tanh(),
        PatchNormConv2d(64, 64, 3, form="norm-like", gain=2.0, padding="same", padding_mode="circular"),
        nn.Tanh(),
        PatchNormConvTranspose2d(64, 32, 4, stride=2, gain="auto"),
        nn.Tanh(),
        nn.Conv2d(32, 3, 1),
    )


def test_patches_of_a_convolutional_chain_keep_the_signal() -> None:
    model, seen = ad.init.signal_(_conv_net(), 3.0, generator=_generator()), []
    for layer in model[2::2]:
        layer.register_forward_pre_hook(lambda layer, args: seen.append((layer, args[0])))
    z = model(torch.randn(8, 3, 25, 25, generator=_generator(1)))
    for layer, x in seen:
        if layer.transposed:
            patches = nn.functional.conv_transpose2d(x.square().sum(1, keepdim=True), torch.ones(1, 1, 4, 4), stride=2)[..., 4:-4, 4:-4]
        else:
            patches = ad.functional.patch_sqnorm(x, layer.kernel_size, groups=layer.groups)
        assert patches.mean().item() == pytest.approx(3.0, rel=0.2)
    assert z.square().sum(1).mean().item() == pytest.approx(3.0, rel=0.7)


def test_flattened_positions_count_into_the_next_row() -> None:
    model = nn.Sequential(PatchNormConv2d(3, 16, 3), nn.Tanh(), nn.Flatten(), AffineLikeLinear(16 * 36, 10))
    ad.init.signal_(model, 2.0, generator=_generator())
    rows = model[:3](torch.randn(64, 3, 8, 8, generator=_generator(1)))
    assert rows.square().sum(1).mean().item() == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (PatchNormConv2d(8, 128, 3, groups=2), 64 * 9),
        (PatchNormConvTranspose2d(64, 32, 4, stride=2), 32 * 4),
        (nn.Conv2d(64, 96, (1, 2)), 96 * 2),
    ],
)
def test_a_convolution_alone_expects_a_next_layer_of_its_own_kernel(layer: Any, width: int) -> None:
    ad.init.signal_(layer, 3.0, nonlinearity="linear", input_signal=1.0, generator=_generator())
    share = 1.0 if isinstance(layer, nn.Conv2d) else 0.5
    assert layer.weight.var().item() == pytest.approx(3.0 / width / share, rel=0.05)


def test_input_signal_of_a_model_defaults_to_unit_mean_square() -> None:
    drawn = [
        ad.init.signal_(nn.Sequential(nn.Linear(50, 20), nn.Linear(20, 3)), generator=_generator(), **options)[0].weight
        for options in ({}, {"input_signal": 50.0}, {"input_signal": 200.0})
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.allclose(drawn[0], 2 * drawn[2], rtol=1e-6)


def test_output_activation_can_be_given() -> None:
    model = nn.Sequential(nn.Linear(50, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU())
    ad.init.signal_(model, 2.0, nonlinearity="relu", output_nonlinearity="relu", generator=_generator())
    assert model[2].weight.var().item() == pytest.approx(2 * 2.0 / 300 / 2.0, rel=0.03)


def test_generator_decides_the_weights_and_no_other_randomness_is_drawn() -> None:
    state = torch.random.get_rng_state()
    first, second = (ad.init.signal_(AffineLikeLinear(5, 4, dtype=torch.float64), generator=_generator()) for _ in range(2))
    torch.random.set_rng_state(state)
    model = AffineLikeLinear(5, 4, dtype=torch.float64)
    after = torch.random.get_rng_state()
    ad.init.signal_(model, generator=_generator())
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(model.weight, first.weight)
    assert torch.equal(torch.random.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_get_the_float32_weights_rounded(dtype: torch.dtype) -> None:
    wide, narrow = (ad.init.signal_(AffineLikeLinear(50, 40, dtype=d), generator=_generator()) for d in (torch.float32, dtype))
    assert narrow.weight.dtype is dtype
    assert torch.equal(wide.weight.to(dtype), narrow.weight)


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tanh": (lambda: nn.Linear(9, 64), {"signal": 64.0}, r"signal must be below 63\.36 .* got 64"),
    "negative": (lambda: nn.Linear(9, 4), {"signal": -1.0}, "signal must be positive and finite, got -1.0"),
    "nan": (lambda: nn.Linear(9, 4), {"signal": math.nan}, "signal must be positive and finite, got nan"),
    "input": (lambda: nn.Linear(9, 4), {"input_signal": 0.0}, "input_signal must be positive and finite"),
    "nonlinearity": (lambda: nn.Linear(9, 4), {"nonlinearity": "gelu"}, "nonlinearity must be one of linear, tanh, relu, leaky_relu"),
    "no-layer": (nn.Tanh, {}, "Tanh has no linear or convolutional layer"),
    "normaliser": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), {}, r"1 \(LayerNorm\) holds parameters .* calibrate_"),
    "not-a-chain": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(6, 2)), {}, "the model is not a chain"),
    "tied": (_tied, {}, "0 and 2 share one weight"),
    "spectral": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), {}, "computed from other parameters"),
    "pruned": (lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5), {}, "computed from other parameters"),
    "empty": (lambda: nn.Linear(0, 4), {}, "has no entries"),
    "lazy": (lambda: nn.LazyLinear(4), {}, "is lazy and has no shape yet; run one forward first"),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), {}, r"is on the device meta and has no values; call model\.to_empty"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_starts_are_refused_and_change_nothing(make: Any, options: dict[str, Any], message: str) -> None:
    module = make()
    before = None if message.endswith(("forward first", "to_empty")) else [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=message):
        ad.init.signal_(module, **options)
    assert before is None or all(torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))


def test_arguments_of_the_wrong_type_are_type_errors() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"):
        ad.init.signal_([nn.Linear(2, 2)])  # type: ignore[type-var]
    with pytest.raises(TypeError, match="signal must be a number, the mean squared norm of a row, got Tensor"):
        ad.init.signal_(nn.Linear(2, 2), torch.tensor(1.0))  # type: ignore[arg-type]
