# A dead ReLU, a padding token, a black patch: rows of zeros give finite values and gradients, and the right ones.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from maps import AFFINE_LIKE, NORM_LIKE, Map, every_map, gradients
from oracles import FLOAT32_EPS, TOLERANCE, close
from torch import Tensor

from affine_divergence.functional import affine_like_linear, norm_like_linear

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def _with_a_zero_row(map_: Map, dtype: torch.dtype) -> list[torch.Tensor]:
    x, weight, bias = map_.tensors(5, 4, 3, dtype=dtype)
    return [x.detach().index_fill(0, torch.tensor([1]), 0.0).requires_grad_(), weight, bias]


@every_map
@dtypes
def test_a_zero_row_gives_gain_times_the_bias_exactly(map_: Map, dtype: torch.dtype) -> None:
    x, weight, bias = _with_a_zero_row(map_, dtype)
    gain = map_.options.get("gain", 1.0)
    expected = torch.zeros(4, dtype=dtype) if bias is None else (gain * bias.detach().to(torch.promote_types(dtype, torch.float32)))
    close(map_(x, weight, bias)[1], expected.to(dtype), tolerance=torch.finfo(dtype).eps)


@every_map
@dtypes
def test_gradients_with_a_zero_row_are_those_of_the_definition(map_: Map, dtype: torch.dtype) -> None:
    tensors = _with_a_zero_row(map_, dtype)
    z, expected = map_(*tensors), map_.expected(*tensors)
    upstream = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).to(dtype)
    wanted_gradients = gradients(expected, upstream.double(), *tensors)
    for actual, wanted in zip(gradients(z, upstream, *tensors), wanted_gradients, strict=True):
        close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@dtypes
def test_a_norm_like_zero_row_without_eps_passes_no_gradient_and_adds_none_to_the_weight(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(1, 5, dtype=dtype, requires_grad=True), torch.ones(4, 5, dtype=dtype, requires_grad=True)
    norm_like_linear(x, weight, torch.ones(4, dtype=dtype), eps=0.0).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad.any()
    assert not weight.grad.any()


def test_a_norm_like_zero_row_passes_the_gradient_over_root_eps() -> None:
    # The largest factor there is: 2896, not the 1e12 of F.normalize.
    x, weight = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True), torch.eye(2, dtype=torch.float64)
    norm_like_linear(x, weight).sum().backward()
    assert x.grad is not None
    close(x.grad, torch.full((1, 2), FLOAT32_EPS**-0.5, dtype=torch.float64))


@dtypes
def test_an_affine_like_zero_row_passes_the_gradient_of_the_plain_layer(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(1, 5, dtype=dtype, requires_grad=True), torch.full((4, 5), 0.5, dtype=dtype)
    affine_like_linear(x, weight, torch.ones(4, dtype=dtype)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((1, 5), 2.0, dtype=dtype))


@every_map
def test_second_derivatives_at_a_zero_row_are_finite(map_: Map) -> None:
    x, weight, bias = _with_a_zero_row(map_, torch.float64)
    (gradient,) = torch.autograd.grad(map_(x, weight, bias).sin().sum(), x, create_graph=True)
    for second in gradients(gradient, torch.ones_like(gradient), x, weight):
        assert torch.isfinite(second).all()


@pytest.mark.parametrize("map_", [m for m in [*AFFINE_LIKE, *NORM_LIKE] if m.options.get("eps") != 0.0], ids=str)
def test_third_derivatives_at_a_zero_row_are_those_of_the_definition(map_: Map) -> None:
    # ‖x‖² taken as the square of a norm has no second derivative at zero, where it is 2.
    tensors = _with_a_zero_row(map_, torch.float64)
    direction = torch.linspace(0.5, 1.5, 15, dtype=torch.float64).reshape(3, 5)

    def third(function: Callable[..., Tensor]) -> Tensor:
        value = function(*tensors).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, tensors[0], create_graph=True)
            value = (gradient * direction).sum()
        return gradient

    close(third(map_), third(map_.expected), tolerance=1e-10)
