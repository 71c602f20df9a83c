# Mean-field theory against random networks, and the statements of docs/initialisation.md, which name these tests.
from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from affine_divergence.init import Depth, RandomLayer, propagate
from affine_divergence.init._mean_field import (
    beverton_holt,
    bias_share,
    cosine_slope,
    effective_rank,
    fixed_cosine,
    fixed_sqnorm,
    gradient_factor,
    gram_condition,
    gram_cosine,
    next_cosine,
    next_sqnorm,
    output_cosine,
    output_variance,
    patch_products,
    radial_loss,
    self_term,
)
from affine_divergence.init._moments import second_moment, slope_moment, variance_for
from affine_divergence.lab.theory._networks import inputs_like, measured
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear, PatchNormConv1d, PatchNormConv2d

N = 512
LEAKY = 0.5 * (1 + 0.01**2)  # c of a Leaky-ReLU


def layer(kind: str = "affine-like", **options: float) -> RandomLayer:
    return RandomLayer(**{"kind": kind, "fan_in": N, "fan_out": N, "variance": 1 / N} | options)  # type: ignore[arg-type]


def widths(*sizes: int, **options: float) -> list[RandomLayer]:
    # Var W = 4/fan_out, and 2/fan_in in the first layer.
    pairs = list(itertools.pairwise(sizes))
    return [layer(fan_in=n, fan_out=m, variance=2 / n if place == 0 else 4 / m, **options) for place, (n, m) in enumerate(pairs)]


CHAINS: dict[str, tuple[list[RandomLayer], str, float]] = {
    "affine-like, tanh, gain 1": ([layer(variance=2 / N)] * 6, "tanh", 1.0),
    "affine-like, leaky_relu, gain 1": ([layer(variance=4 / N)] * 6, "leaky_relu", 1.0),
    "affine-like, dying": ([layer(variance=1 / (3 * N))] * 5, "leaky_relu", 1.0),
    "affine-like, biases as weights": ([layer(variance=1 / (3 * N), bias_variance=1 / (3 * N))] * 4, "tanh", 1.0),
    "affine-like, relu, large biases": ([layer(variance=3 / N, bias_variance=5 / N)] * 4, "relu", 1.0),
    "affine-like, gain √(n + 1)": ([layer(gain=math.sqrt(N + 1))] * 5, "tanh", 100.0),
    "affine-like, unequal widths": (widths(1000, 300, 700, 400, 600), "leaky_relu", 1000.0),
    "norm-like with biases": ([layer("norm-like", bias_variance=0.5 / N, gain=math.sqrt(N))] * 5, "tanh", 100.0),
    "norm-like with an eps": ([layer("norm-like", variance=2 / N, eps=2.0, bias_variance=1 / N)] * 4, "leaky_relu", 1.0),
    "plain with biases": ([layer("plain", variance=2 / N, bias_variance=0.05)] * 5, "relu", float(N)),
}


Networks = Callable[[str], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def networks() -> Networks:
    @functools.cache
    def of(chain: str) -> tuple[np.ndarray, np.ndarray]:
        layers, nonlinearity, sqnorm = CHAINS[chain]
        return networks_of(layers, nonlinearity, sqnorm, seeds=6)

    return of


def field(name: str) -> int:
    return list(Depth.__dataclass_fields__).index(name)


every_chain = pytest.mark.parametrize("chain", CHAINS)


# One layer


@pytest.mark.parametrize("options", [{"bias_variance": 0.6}, {"bias_variance": 0.0}, {"gain": 3.0, "bias_variance": 1.0}])
@pytest.mark.parametrize("kind", ["plain", "affine-like", "norm-like"])
def test_s1_output_variance_of_one_layer(kind: str, options: dict[str, float]) -> None:
    random, x, weight, bias = draws(kind, options)
    z = definition(random, x, weight, bias)
    assert output_variance(random, float(x[0].square().sum())) == pytest.approx(z.square().mean().item(), rel=0.01)
    without = definition(random, x, weight, 0 * bias)
    assert bias_share(random, float(x[0].square().sum())) == pytest.approx(
        1 - (without.square().mean() / z.square().mean()).item(), abs=0.01
    )


def test_s1_equal_bias_variance_makes_output_variance_constant() -> None:
    for rho in (0.0, 1e-6, 1.0, 1e6):
        assert output_variance(layer(bias_variance=1 / N, gain=3.0), rho) == pytest.approx(9 / N, rel=1e-12)


@every_chain
def test_s1_s2_signal_matches_random_networks(chain: str, networks: Networks) -> None:
    theory, seen = networks(chain)
    for name in ("sqnorm", "variance"):
        np.testing.assert_allclose(seen[:, field(name)], theory[:, field(name)], rtol=0.12)


def test_s2_fan_out_and_not_fan_in_sets_the_next_norm() -> None:
    def after(*sizes: int) -> float:
        layers = [RandomLayer(kind="affine-like", fan_in=n, fan_out=m, variance=0.01) for n, m in itertools.pairwise(sizes)]
        return propagate(layers, "relu", sqnorm=1.0, cosine=0.0)[1].sqnorm

    assert after(50, 300, 10) == after(900, 300, 10) == pytest.approx(300 * 0.01 / 4, rel=1e-12)


@pytest.mark.parametrize("options", [{"bias_variance": 0.6}, {"bias_variance": 0.0, "gain": 3.0}])
@pytest.mark.parametrize("kind", ["plain", "affine-like", "norm-like"])
def test_s3_gradient_factor_of_one_narrow_layer(kind: str, options: dict[str, float]) -> None:
    random, x, weight, bias = draws(kind, options)
    x.requires_grad_()
    upstream = torch.randn(x.shape[0], 2, dtype=x.dtype)
    (below,) = torch.autograd.grad(definition(random, x, weight, bias), x, upstream)
    factor = below.square().mean() / upstream.square().mean()
    rho = float(x[0].detach().square().sum())
    assert gradient_factor(random, rho) * (1 - radial_loss(random, rho)) == pytest.approx(factor.item(), rel=0.015)


def test_s3_norm_like_layer_of_one_input_passes_no_gradient() -> None:
    assert radial_loss(layer("norm-like", fan_in=1), 4.0) == 1.0


@every_chain
def test_s3_gradient_factor_matches_random_networks(chain: str, networks: Networks) -> None:
    theory, seen = networks(chain)
    np.testing.assert_allclose(seen[:, field("gradient_factor")], theory[:, field("gradient_factor")], rtol=0.08)


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu", "leaky_relu"])
def test_s4_gradient_follows_the_signal(nonlinearity: str) -> None:
    sizes = (100, 300, 200, 500)
    layers = [layer(fan_in=n, fan_out=m, variance=5 / m, bias_variance=2 / m) for n, m in itertools.pairwise(sizes)]
    depths = propagate(layers, nonlinearity, sqnorm=2.0, cosine=0.0)
    for below, here, above in zip(depths, depths[1:], depths[2:], strict=False):
        share = bias_share(layers[1], here.sqnorm)
        c = second_moment(here.variance, nonlinearity) / here.variance
        expected = (1 - share) * above.sqnorm / here.sqnorm * slope_moment(below.variance, nonlinearity) / c
        assert here.gradient_factor == pytest.approx(expected, rel=1e-12)


def test_s4_gradient_and_signal_of_relu_networks_shrink_alike() -> None:
    _, seen = networks_of([layer(variance=1 / N)] * 5, "leaky_relu", 1.0, seeds=6)
    signal = seen[-1, field("sqnorm")] / seen[1, field("sqnorm")]
    gradient = seen[1:-1, field("gradient_factor")].prod()
    assert gradient == pytest.approx(signal, rel=0.2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["plain", "affine-like", "norm-like"])
def test_s5_gram_matrix_is_that_of_the_gradients(kind: str, bias: bool) -> None:
    random = layer(kind, fan_in=5, fan_out=1, gain=2.0, bias=bias, eps=0.5 if kind == "norm-like" else 0.0)
    x = inputs_like(2, 5, sqnorm=3.0, cosine=0.2, generator=torch.Generator().manual_seed(0))
    cosine = float(x[0] @ x[1] / 3.0)
    weight, shift = torch.randn(1, 5, dtype=x.dtype, requires_grad=True), torch.zeros(1, dtype=x.dtype, requires_grad=True)
    learns = (weight, shift) if bias else (weight,)
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(definition(random, row, weight, shift).sum(), learns)]) for row in x]
    assert self_term(random, 3.0) == pytest.approx((rows[0] @ rows[0]).item(), rel=1e-12)
    expected = rows[0] @ rows[1] / (rows[0].norm() * rows[1].norm())
    assert gram_cosine(random, 3.0, cosine) == pytest.approx(expected.item(), rel=1e-12)


def test_s5_condition_and_rank_of_the_gram_matrix() -> None:
    matrix = np.full((7, 7), 0.4) + 0.6 * np.eye(7)
    values = np.linalg.eigvalsh(matrix)
    assert gram_condition(0.4, 7) == pytest.approx(values[-1] / values[0], rel=1e-12)
    assert effective_rank(0.4, 7) == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-12)
    assert gram_condition(1.0, 7) == math.inf


def test_s5_condition_of_random_rows_far_apart() -> None:
    # Rows long enough that their cosines scatter by less than 1 % around κ.
    x = inputs_like(8, 20_000, sqnorm=0.5, cosine=0.0, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([x, torch.ones(8, 1, dtype=x.dtype)], 1)
    gram = rows @ rows.T / 1.5
    assert torch.linalg.cond(gram).item() == pytest.approx(gram_condition(gram_cosine(layer(), 0.5, 0.0), 8), rel=0.05)


@every_chain
def test_s5_s6_cosines_match_random_networks(chain: str, networks: Networks) -> None:
    theory, seen = networks(chain)
    for name in ("cosine", "gram_cosine", "output_cosine"):
        np.testing.assert_allclose(seen[:, field(name)], theory[:, field(name)], atol=0.03)


def test_s6_normalisation_changes_no_cosine_without_a_bias() -> None:
    # And with a bias drawn like a weight the outputs have the cosine of the augmented rows.
    for kind in ("plain", "affine-like", "norm-like"):
        assert output_cosine(layer(kind, gain=3.0), 0.7, 0.2) == pytest.approx(0.2, rel=1e-12)
    assert output_cosine(layer(bias_variance=1 / N), 0.7, 0.2) == pytest.approx((1 + 0.7 * 0.2) / 1.7, rel=1e-12)


# Gain 1


@pytest.mark.parametrize("rate", [0.3, 1.0, 2.5])
def test_s7_signal_at_gain_one_is_beverton_holt(rate: float) -> None:
    depths = propagate([layer(variance=rate / (LEAKY * N))] * 9, "leaky_relu", sqnorm=0.8, cosine=0.0)
    for place, depth in enumerate(depths):
        assert depth.sqnorm == pytest.approx(beverton_holt(0.8, rate, place), rel=1e-12)
        assert depth.gradient_factor == pytest.approx(rate / (1 + depth.sqnorm) / (1 if place else LEAKY), rel=1e-12)


def test_s7_beverton_holt_has_three_phases() -> None:
    dying = [beverton_holt(2.0, 0.5, depth) for depth in (40, 41)]
    assert dying[1] / dying[0] == pytest.approx(0.5, rel=1e-9)
    assert 1 / beverton_holt(2.0, 1.0, 100) == pytest.approx(100.5, rel=1e-12)
    assert beverton_holt(2.0, 3.5, 60) == pytest.approx(2.5, rel=1e-12)


def test_s8_weights_of_nn_linear_die_at_gain_one() -> None:
    for nonlinearity, rate in (("tanh", 1 / 3), ("leaky_relu", LEAKY / 3)):
        theory, seen = networks_of([layer(variance=1 / (3 * N))] * 7, nonlinearity, 1e-3, seeds=4)
        for factors in (theory, seen):
            assert (factors[-1, field("sqnorm")] / 1e-3) ** (1 / 6) == pytest.approx(rate, rel=0.03)
            assert factors[1:, field("gradient_factor")].prod() ** (1 / 6) == pytest.approx(rate, rel=0.03)
        assert theory[-1, field("gram_cosine")] > 0.999999


def test_s9_default_biases_keep_the_norm_and_lose_the_inputs() -> None:
    for nonlinearity, activation, c in (("tanh", nn.Tanh(), 1.0), ("leaky_relu", nn.LeakyReLU(), LEAKY)):
        random = layer(variance=1 / (3 * N), bias_variance=1 / (3 * N))
        assert fixed_sqnorm(random, nonlinearity) == pytest.approx(c / 3, rel=0.01)
        gaps, norms = [], []
        x = inputs_like(8, N, sqnorm=c / 3, cosine=0.0, generator=torch.Generator().manual_seed(0))
        for _ in range(6):
            x = activation(AffineLikeLinear(N, N, dtype=x.dtype)(x)).detach()
            norms.append(x.square().sum(1).mean().item())
            gaps.append((x - x.mean(0)).square().sum().item())
        assert norms == pytest.approx([c / 3] * 6, rel=0.3)
        # The differences between samples have c/(3 + c) of their square left after each layer; so has the gradient.
        assert (gaps[-1] / gaps[1]) ** (1 / 4) == pytest.approx(c / (3 + c), rel=0.06)
        assert gradient_factor(random, c / 3, c) == pytest.approx(c / (3 + c), rel=0.01)
        q = output_variance(random, c / 3)
        assert (1 - bias_share(random, c / 3)) * cosine_slope(q, 1.0, nonlinearity) == pytest.approx(c / (3 + c), rel=0.01)


# Fixed points


@pytest.mark.parametrize("nonlinearity", ["tanh", "leaky_relu"])
@pytest.mark.parametrize("name", ["gain 1", "gain 1, biases", "gain √(n + 1)", "norm-like", "norm-like, biases", "plain"])
def test_s10_gradient_factor_at_the_fixed_point_is_the_slope_of_the_cosine(name: str, nonlinearity: str) -> None:
    wide = {"fan_in": 10**6, "fan_out": 10**6, "variance": 4e-6}
    random = {
        "gain 1": layer(**wide),
        "gain 1, biases": layer(**wide, bias_variance=8e-6),
        "gain √(n + 1)": layer(**wide, gain=math.sqrt(10**6 + 1)),
        "norm-like": layer("norm-like", **wide, gain=700.0),
        "norm-like, biases": layer("norm-like", **wide, gain=700.0, bias_variance=2e-6),
        "plain": layer("plain", **wide | {"variance": 1.5e-6}, bias_variance=0.1),
    }[name]
    rho = fixed_sqnorm(random, nonlinearity)
    q = output_variance(random, rho)
    assert next_sqnorm(q, 10**6, nonlinearity) == pytest.approx(rho, rel=1e-9)
    slope = (1 - bias_share(random, rho)) * cosine_slope(q, 1.0, nonlinearity)
    assert gradient_factor(random, rho, slope_moment(q, nonlinearity)) == pytest.approx(slope, rel=1e-9)


def test_s10_slope_is_one_for_relu_kinds_and_above_one_for_tanh() -> None:
    for q, tanh in ((0.1, 1.0084), (1 / 3, 1.0495), (1.0, 1.1778), (2.0, 1.3443)):
        assert cosine_slope(q, 1.0, "relu") == pytest.approx(1.0, rel=1e-12)
        assert cosine_slope(q, 1.0, "leaky_relu") == pytest.approx(1.0, rel=1e-12)
        assert cosine_slope(q, 1.0, "tanh") == pytest.approx(tanh, abs=5e-5)


def test_s10_fixed_norm_is_zero_or_refused_where_there_is_none() -> None:
    assert fixed_sqnorm(layer(variance=1 / N), "tanh") == 0.0
    assert fixed_sqnorm(layer(variance=1 / (LEAKY * N)), "leaky_relu") == 0.0
    assert fixed_sqnorm(layer(variance=3 / (LEAKY * N)), "leaky_relu") == pytest.approx(2.0, rel=1e-12)
    with pytest.raises(ValueError, match="multiplies every squared norm by 2"):
        fixed_sqnorm(layer("plain", variance=4 / N), "relu")
    with pytest.raises(ValueError, match="grows without bound"):
        fixed_sqnorm(layer("plain", variance=4 / N, bias_variance=0.1), "relu")


def test_s11_gain_root_of_fan_in_plus_one_gives_the_weights_scale() -> None:
    for nonlinearity, ratio in (("tanh", 0.21), ("leaky_relu", 0.17)):
        random = layer(variance=1 / (3 * N), gain=math.sqrt(N + 1))
        rho = fixed_sqnorm(random, nonlinearity)
        assert rho / N == pytest.approx(ratio, abs=0.006)
        assert output_variance(random, rho) == pytest.approx((1 + 1 / N) / 3 * rho / (1 + rho), rel=1e-12)


def test_s12_cosines_of_relu_kinds_approach_one_by_a_power_law() -> None:
    for nonlinearity, slope in (("relu", 0.0), ("leaky_relu", 0.01)):
        k = (1 - slope) ** 2 / (1 + slope**2) * 2 * math.sqrt(2) / (3 * math.pi)
        gap, depth = 1.0, 3000
        for _ in range(depth):
            gap = 1 - next_cosine(1.0, 1 - gap, nonlinearity)
        assert gap * depth**2 == pytest.approx(4 / k**2, rel=0.03)
        assert fixed_cosine(layer(variance=3 / N), 2.0, nonlinearity) == 1.0


def test_s12_tanh_without_biases_makes_samples_orthogonal() -> None:
    random = layer(variance=1 / N, gain=math.sqrt(N + 1))
    rho = fixed_sqnorm(random, "tanh")
    q = output_variance(random, rho)
    assert fixed_cosine(random, rho, "tanh") == 0.0
    near = next_cosine(q, 1e-4, "tanh") / 1e-4
    assert near == pytest.approx(cosine_slope(q, 0.0, "tanh"), rel=1e-6)
    assert 0.9 < near < 1.0


def test_s12_biases_give_tanh_a_cosine_between() -> None:
    random = layer(variance=3 / N, gain=math.sqrt(N + 1), bias_variance=0.1 / N * N)
    rho = fixed_sqnorm(random, "tanh")
    fixed = fixed_cosine(random, rho, "tanh")
    assert 0.1 < fixed < 0.9
    for start in (0.0, 0.99):
        chain = propagate([random] * 200, "tanh", sqnorm=rho, cosine=start)
        assert chain[-1].cosine == pytest.approx(fixed, abs=1e-6)


def test_s12_linear_layers_without_biases_move_no_cosine() -> None:
    assert propagate([layer()] * 9, "linear", sqnorm=1.0, cosine=0.3)[-1].cosine == pytest.approx(0.3, rel=1e-12)
    with pytest.raises(ValueError, match="every cosine stays"):
        fixed_cosine(layer(), 1.0, "linear")
    assert fixed_cosine(layer(bias_variance=1 / N), 1.0, "linear") == 1.0


def test_s13_a_bias_that_learns_keeps_gram_cosines_above_a_floor() -> None:
    for rho in (0.1, 1.0, 30.0):
        assert gram_cosine(layer(), rho, 0.0) == pytest.approx(1 / (1 + rho), rel=1e-12)
        assert gram_cosine(layer(), rho, 0.4) > 1 / (1 + rho)
        assert gram_cosine(layer(bias=False), rho, 0.0) == 0.0


# One family


def test_s14_one_family_holds_norm_like_affine_like_and_plain_layers() -> None:
    x = torch.randn(9, 6, dtype=torch.float64)
    plain = nn.Linear(6, 4, bias=False, dtype=x.dtype)

    def member(eps: float, gain: float = 1.0) -> NormLikeLinear:
        made = NormLikeLinear(6, 4, bias=False, dtype=x.dtype, eps=eps, gain=gain)
        made.load_state_dict(plain.state_dict())
        return made

    affine = AffineLikeLinear(6, 4, bias=False, dtype=x.dtype)
    affine.load_state_dict(plain.state_dict())
    torch.testing.assert_close(member(1.0)(x), affine(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(member(1e-16)(x), member(0.0)(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(member(1e10, gain=1e5)(x), plain(x), rtol=1e-8, atol=0)
    assert not torch.allclose(member(1.0)(x), member(0.0)(x), rtol=1e-3)
    # Only ‖x‖²/ε counts: the layer of ε is the affine-like one at inputs divided by √ε.
    torch.testing.assert_close(member(7.0, gain=2.0)(x), 2.0 * affine(x / math.sqrt(7.0)), rtol=1e-13, atol=0)


Rates = Callable[[float], tuple[float, dict[str, float]]]
TAKEN: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float], Rates]] = {
    # At gain 1 with weights × g: the rate, and the options, that go with it.
    "SGD": (torch.optim.SGD, {}, lambda g: (g * g, {})),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}, lambda g: (g * g, {"momentum": 0.9})),
    "SGD with decay": (torch.optim.SGD, {"weight_decay": 0.02}, lambda g: (g * g, {"weight_decay": 0.02 / (g * g)})),
    "Adam": (torch.optim.Adam, {"eps": 1e-3}, lambda g: (g, {"eps": 1e-3 / g})),
    "AdamW": (torch.optim.AdamW, {"eps": 1e-3, "weight_decay": 0.1}, lambda g: (g, {"eps": 1e-3 / g, "weight_decay": 0.1 / g})),
}
GAINS = (0.5, 3.0, 1.7)


def network_of(gains: Sequence[float]) -> nn.Sequential:
    torch.manual_seed(3)
    first, second, third = gains
    return nn.Sequential(
        PatchNormConv1d(2, 3, 3, gain=first),
        nn.Tanh(),
        nn.Flatten(),
        AffineLikeLinear(12, 5, gain=second),
        nn.LeakyReLU(),
        NormLikeLinear(5, 2, gain=third, eps=0.1),
    ).double()


def trained(network: nn.Sequential, groups: list[dict[str, object]], kind: type[torch.optim.Optimizer]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    optimizer = kind(groups, lr=0.01)  # type: ignore[call-arg]
    for _ in range(50):
        x = torch.randn(8, 2, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (network(x) - x[:, :, 0]).square().mean().backward()
        optimizer.step()
    return network(torch.ones(4, 2, 6, dtype=torch.float64) * torch.arange(4)[:, None, None]).detach()


@pytest.mark.parametrize("name", TAKEN)
def test_s15_s16_gain_is_a_scale_of_weights_and_of_each_layers_rate(name: str) -> None:
    kind, options, matching = TAKEN[name]
    with_gains, without = network_of(GAINS), network_of((1.0, 1.0, 1.0))
    before = copy.deepcopy(with_gains)
    groups: list[dict[str, object]] = []
    for place, gain in zip((0, 3, 5), GAINS, strict=True):
        rate, changed = matching(gain)
        parameters = list(without[place].parameters())
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(gain)
        groups.append({"params": parameters, "lr": 0.01 * rate, **changed})
    lr = [{"params": list(with_gains.parameters()), **options}]
    expected = trained(with_gains, lr, kind)
    torch.testing.assert_close(trained(without, groups, kind), expected, rtol=1e-10, atol=1e-12)
    # The training did something, and one rate for all layers does something else.
    x = torch.ones(1, 2, 6, dtype=torch.float64)
    assert not torch.allclose(before(x), with_gains(x), rtol=0.05)


def test_s15_one_rate_for_all_layers_does_not_replace_gains() -> None:
    with_gains, scaled = network_of(GAINS), network_of((1.0, 1.0, 1.0))
    for place, gain in zip((0, 3, 5), GAINS, strict=True):
        with torch.no_grad():
            for parameter in scaled[place].parameters():
                parameter.mul_(gain)
    expected = trained(with_gains, [{"params": list(with_gains.parameters())}], torch.optim.SGD)
    for squared in (gain * gain for gain in GAINS):
        other = copy.deepcopy(scaled)
        found = trained(other, [{"params": list(other.parameters()), "lr": 0.01 * squared}], torch.optim.SGD)
        assert not torch.allclose(found, expected, rtol=1e-3)


# Convolutions


def test_s17_convolution_keeps_signal_and_gradient_as_its_fans_say() -> None:
    channels, taps = 200, 3
    random = layer(fan_in=channels * taps, fan_out=channels * taps, variance=4 / (channels * taps))
    theory = propagate([random] * 4, "leaky_relu", sqnorm=1.0, cosine=0.0)
    seen = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, channels, 24, generator=generator, dtype=torch.float64)
        pixels = [(x / (x.square().mean() * channels * taps).sqrt()).requires_grad_()]
        outputs = []
        for _ in theory:
            conv = PatchNormConv1d(channels, channels, taps, padding=1, padding_mode="circular", dtype=x.dtype)
            with torch.no_grad():
                conv.weight.normal_(0.0, random.variance**0.5, generator=generator)
                conv.bias.zero_()
            outputs.append(conv(pixels[-1]))
            pixels.append(nn.functional.leaky_relu(outputs[-1]))
        sizes = [g.square().mean() for g in torch.autograd.grad(outputs[-1], [pixels[0], *outputs], torch.randn_like(x))]
        norms = [taps * pixel.square().sum(1).mean() for pixel in pixels]
        seen.append([[n.item(), (b / a).item()] for n, b, a in zip(norms, sizes, sizes[1:], strict=False)])
    means = np.array(seen).mean(0)
    np.testing.assert_allclose(means[:, 0], [depth.sqnorm for depth in theory], rtol=0.1)
    np.testing.assert_allclose(means[:, 1], [depth.gradient_factor for depth in theory], rtol=0.1)


def test_s18_products_of_patches_are_sums_of_products_of_pixels() -> None:
    x = torch.randn(3, 7, dtype=torch.float64)  # channels × positions of a ring
    patches = torch.stack([torch.cat([x[:, (p + tap) % 7] for tap in (-1, 0, 1)]) for p in range(7)])
    found = patch_products((x.T @ x).numpy(), [-1, 0, 1])
    np.testing.assert_allclose(found, (patches @ patches.T).numpy(), rtol=1e-12, atol=1e-12)


def test_s18_overlap_alone_does_not_make_patches_alike() -> None:
    def cosine_of_neighbours(x: Tensor) -> float:
        patches = nn.functional.unfold(x, 3).mT[0]
        side = x.shape[-1] - 2
        grid = patches.unflatten(0, (side, side))
        return ((grid[:, 1:] * grid[:, :-1]).sum() / grid[:, 1:].square().sum()).item()

    noise = torch.randn(1, 16, 40, 40, dtype=torch.float64)
    assert cosine_of_neighbours(noise) == pytest.approx(0.0, abs=0.03)  # though they share two thirds of their pixels
    smooth = noise[..., :-1] + noise[..., 1:]  # neighbouring pixels have the cosine ½
    assert cosine_of_neighbours(smooth[..., 1:, :]) == pytest.approx(0.5, abs=0.03)
    # The outputs of a random layer, and through a ReLU their cosine is R of that of the patches.
    conv = PatchNormConv2d(16, 1000, 3, bias=False, dtype=noise.dtype)
    for x, cosine in ((noise, 0.0), (smooth[..., 1:, :], 0.5)):
        z = conv(x[..., :30, :30]).detach()
        for of, expected in ((z, cosine), (z.relu(), next_cosine(1.0, cosine, "relu"))):
            assert ((of[..., 1:] * of[..., :-1]).sum() / of[..., 1:].square().sum()).item() == pytest.approx(expected, abs=0.06)


# The two starts


def test_s19_hidden_gain_needs_biases_of_zero_behind_a_wide_input() -> None:
    first = layer(fan_in=3072, fan_out=256, variance=1 / (3 * 3072))
    hidden = layer(fan_in=256, fan_out=256, variance=1 / (3 * 256), gain=math.sqrt(257))

    def gap(bias: float) -> list[float]:
        chain = [replace(one, bias_variance=bias * one.variance) for one in (first, *[hidden] * 4)]
        return [1 - depth.gram_cosine for depth in propagate(chain, "tanh", sqnorm=3072.0, cosine=0.0)]

    assert gap(0.0)[2:] == pytest.approx([0.69, 0.96, 0.98], abs=0.02)
    assert gap(1.0)[2:] == pytest.approx([0.03] * 3, abs=0.005)


@pytest.mark.parametrize(("nonlinearity", "tau"), [("tanh", 1.0), ("leaky_relu", 1.0), ("leaky_relu", 20.0)])
def test_s20_fixed_point_start_keeps_norm_and_gradient_at_unequal_widths(nonlinearity: str, tau: float) -> None:
    sizes = (2000, 300, 500, 400, 600)
    layers = []
    for place, (n, m) in enumerate(itertools.pairwise(sizes)):
        q = variance_for(tau / m, nonlinearity)
        c = second_moment(q, nonlinearity) / q
        variance = tau / (c * m) * (1 + 1 / 2000) if place == 0 else (1 + tau) / (c * m)
        layers.append(layer(fan_in=n, fan_out=m, variance=variance))
    for found in networks_of(layers, nonlinearity, 2000.0, seeds=6):
        assert found[1:, field("sqnorm")] == pytest.approx([tau] * 3, rel=0.1)
        assert found[1:, field("gradient_factor")] == pytest.approx([1.0] * 3, rel=0.1)


# Arguments, and the page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "batch"}, "plain, affine-like, norm-like"),
        ({"variance": -1.0}, "variance must be finite and at least 0"),
        ({"fan_in": 0}, "fan_in must be finite and at least 1"),
        ({"gain": math.inf}, "gain must be finite"),
        ({"eps": 1.0}, "eps belongs to norm-like layers"),
        ({"bias": False, "bias_variance": 1.0}, "bias_variance 0"),
    ],
)
def test_bad_layers_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layer(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sqnorm": -1.0}, "sqnorm"),
        ({"cosine": 2.0}, "cosine"),
        ({"nonlinearity": "gelu"}, "linear, tanh"),
        ({"sqnorm": 0.0}, "give it an eps"),
    ],
)
def test_bad_chains_are_refused(options: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"nonlinearity": "tanh", "sqnorm": 1.0, "cosine": 0.0} | options
    with pytest.raises(ValueError, match=said):
        propagate([layer("norm-like")], **given)  # type: ignore[arg-type]


def test_every_statement_of_the_page_has_a_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "initialisation.md").read_text()
    stated = re.findall(r"^\*\*S(\d+)[ .]", page, re.MULTILINE)
    names = re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.MULTILINE)
    tested = {number for name in names for number in re.findall(r"_s(\d+)(?=_)", name)}
    assert stated == [str(number) for number in range(1, len(stated) + 1)]
    assert set(stated) == tested


def draws(kind: str, options: dict[str, float]) -> tuple[RandomLayer, Tensor, Tensor, Tensor]:
    # 100,000 layers of three inputs and two outputs, and one row for all of them.
    random, many = layer(kind, fan_in=3, fan_out=2, variance=0.7, **options), 100_000
    x = torch.tensor([0.5, -1.0, 0.8], dtype=torch.float64).expand(many, 3).clone()
    weight, bias = torch.randn(many, 2, 3, dtype=x.dtype), torch.randn(many, 2, dtype=x.dtype)
    return random, x, random.variance**0.5 * weight, random.bias_variance**0.5 * bias


def definition(random: RandomLayer, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    g, y, squares = random.gain, (weight @ x[..., None])[..., 0], x.square().sum(-1, keepdim=True)
    if random.kind == "plain":
        return g * (y + bias)
    return g * (y + bias) / (squares + 1).sqrt() if random.kind == "affine-like" else g * (y / (squares + random.eps).sqrt() + bias)


def networks_of(layers: Sequence[RandomLayer], nonlinearity: str, sqnorm: float, *, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    # Theory, and the mean over networks, as arrays of layers × the fields of Depth.
    found = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        x = inputs_like(8, layers[0].fan_in, sqnorm=sqnorm, cosine=0.3, generator=generator)
        found.append([astuple(depth) for depth in measured(layers, nonlinearity, x, generator)])
    theory = propagate(layers, nonlinearity, sqnorm=sqnorm, cosine=0.3)
    return np.array([astuple(depth) for depth in theory]), np.array(found).mean(0)
