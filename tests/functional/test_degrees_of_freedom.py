# What the maps keep of their input: the rank of ∂z/∂x, the radius, the bound and the limits.
from __future__ import annotations

import pytest
import torch
from maps import AFFINE_LIKE, NORM_LIKE, Map
from oracles import FLOAT32_EPS, close
from torch import Tensor
from torch.autograd.functional import jacobian

from affine_divergence.functional import affine_like_linear, norm_like_linear

affine_like_maps = pytest.mark.parametrize("map_", AFFINE_LIKE, ids=str)
scale_free_maps = pytest.mark.parametrize("map_", [m for m in NORM_LIKE if m.options.get("eps") == 0.0], ids=str)

D_IN, D_OUT = 4, 7


def _jacobian(map_: Map, row: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = jacobian(lambda x: map_(x, weight, bias), row)
    return result


@affine_like_maps
@pytest.mark.parametrize("length", [0.0, 1e-3, 1.0, 30.0])
def test_the_jacobian_of_an_affine_like_map_has_full_rank(map_: Map, length: float) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 3)
    for row in length * x.detach():
        assert torch.linalg.matrix_rank(_jacobian(map_, row, weight, bias)) == D_IN


@scale_free_maps
@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_the_jacobian_of_a_norm_like_map_loses_the_radial_direction_and_only_that(map_: Map, length: float) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 3)
    for row in length * x.detach():
        J = _jacobian(map_, row, weight, bias)
        assert torch.linalg.matrix_rank(J, rtol=1e-12) == D_IN - 1
        close(J @ row, torch.zeros(D_OUT, dtype=torch.float64), tolerance=1e-13, scale=float(J.norm() * row.norm()))


@scale_free_maps
def test_a_norm_like_map_does_not_see_the_length_of_its_input(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 3)
    for length in (1e-6, 0.3, 1e6):
        close(map_(length * x, weight, bias), map_(x, weight, bias))


@affine_like_maps
def test_an_affine_like_map_sees_the_length_of_its_input(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 3)
    assert ((map_(2 * x, weight, bias) - map_(x, weight, bias)).norm(dim=1) > 0.01).all()


def test_of_one_feature_only_the_sign_survives_a_norm_like_map() -> None:
    x = torch.tensor([[-1e3], [-1e-6], [2e-6], [7.0]], dtype=torch.float64)
    weight, bias = torch.tensor([[2.0], [-3.0]], dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64)
    expected = torch.tensor([[-1.5, 3.0], [-1.5, 3.0], [2.5, -3.0], [2.5, -3.0]], dtype=torch.float64)
    close(norm_like_linear(x, weight, bias, eps=0.0), expected)


def test_of_one_feature_an_affine_like_map_keeps_the_order() -> None:
    x = torch.linspace(-20, 20, 101, dtype=torch.float64).unsqueeze(1)
    z = affine_like_linear(x, torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    assert (z.diff(dim=0) > 0).all()


@affine_like_maps
def test_an_affine_like_output_is_never_longer_than_gain_times_the_spectral_norm(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 500)
    lengths = torch.logspace(-4, 4, 500, dtype=torch.float64).unsqueeze(1)
    augmented = weight if bias is None else torch.cat([weight, bias.unsqueeze(1)], 1)
    bound = map_.options.get("gain", 1.0) * torch.linalg.matrix_norm(augmented, 2).item()
    assert map_(lengths * x, weight, bias).norm(dim=1).max() <= bound


@pytest.mark.parametrize("gain", [1.0, 1.7])
def test_the_bound_of_an_affine_like_map_is_reached(gain: float) -> None:
    _, weight, bias = AFFINE_LIKE[0].tensors(D_IN, D_OUT)
    _, lengths, directions = torch.linalg.svd(torch.cat([weight, bias.unsqueeze(1)], 1))
    top = directions[0] / directions[0, -1]  # [x; 1] along the first right singular vector
    close(affine_like_linear(top[:-1], weight, bias, gain=gain).norm(), gain * lengths[0])


@affine_like_maps
def test_an_affine_like_map_is_the_weights_applied_to_the_augmented_input_on_the_unit_sphere(map_: Map) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, 5)
    augmented_x = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1)
    augmented_weight = torch.cat([weight, (torch.zeros_like(weight[:, 0]) if bias is None else bias).unsqueeze(1)], 1)
    on_sphere = augmented_x / augmented_x.norm(dim=1, keepdim=True)
    close(map_(x, weight, bias), map_.options.get("gain", 1.0) * on_sphere @ augmented_weight.mT)


@affine_like_maps
def test_a_long_row_of_an_affine_like_map_tends_to_the_norm_like_map_without_its_bias(map_: Map) -> None:
    # z − W x/‖x‖ = b/‖x‖ + O(‖x‖⁻²): it falls ten times where x grows ten times.
    x, weight, bias = map_.tensors(D_IN, D_OUT, 5)
    gain = map_.options.get("gain", 1.0)
    limit = norm_like_linear(x, weight, gain=gain, eps=0.0)
    distances = [(map_(length * x, weight, bias) - limit).norm().item() for length in (1e3, 1e4, 1e5)]
    order = 2.0 if bias is None else 1.0
    assert distances[0] < 1e-2 * limit.norm().item()
    assert distances[1] / distances[0] == pytest.approx(10**-order, rel=1e-2)
    if bias is not None:
        assert distances[2] / distances[1] == pytest.approx(0.1, rel=1e-2)


def test_an_affine_like_map_of_zero_is_the_bias_and_it_is_smooth_there() -> None:
    _, weight, bias = AFFINE_LIKE[0].tensors(D_IN, D_OUT)
    zero = torch.zeros(D_IN, dtype=torch.float64)
    assert torch.equal(affine_like_linear(zero, weight, bias, gain=2.0), 2.0 * bias)
    J = jacobian(lambda x: affine_like_linear(x, weight, bias), zero)
    assert torch.equal(J, weight)


def test_no_eps_given_is_that_of_float32_in_float64_too() -> None:
    x = torch.tensor([[1e-4, 0.0]], dtype=torch.float64)
    z = norm_like_linear(x, torch.eye(2, dtype=torch.float64))
    close(z, torch.tensor([[1e-4 / (1e-8 + FLOAT32_EPS) ** 0.5, 0.0]], dtype=torch.float64))
