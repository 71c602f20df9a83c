# Where 16 bits overflow, flush to zero or lose the "+1": the values are right all the same.
from __future__ import annotations

import pytest
import torch
from maps import Map, every_kind, every_map, gradients
from oracles import FLOAT32_EPS, TOLERANCE, close
from torch import Tensor

from affine_divergence.functional import affine_like_linear, norm_like_linear

both = pytest.mark.parametrize("function", [affine_like_linear, norm_like_linear], ids=["affine-like", "norm-like"])
half_precision = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@both
def test_in_float16_a_row_whose_sum_of_squares_overflows_is_not_zero(function: object) -> None:
    # 8 · 100² = 80,000 is above float16's 65,504: the row came out as exactly 0. The truth is about √8.
    x = torch.full((1, 8), 100.0, dtype=torch.float16)
    z = function(x, torch.ones(1, 8, dtype=torch.float16))  # type: ignore[operator]
    close(z, torch.tensor([[8**0.5]], dtype=torch.float64))
    z = function(x, torch.eye(8, dtype=torch.float16)[:1])  # type: ignore[operator]
    close(z, torch.tensor([[8**-0.5]], dtype=torch.float64))


@both
@pytest.mark.parametrize("biased", [True, False])
def test_in_float16_the_product_may_overflow_before_it_is_scaled(function: object, biased: bool) -> None:
    # W x = 153,600; z = √512 = 22.6.
    x, weight = torch.full((2, 512), 300.0, dtype=torch.float16), torch.ones(3, 512, dtype=torch.float16)
    z = function(x, weight, torch.zeros(3, dtype=torch.float16) if biased else None)  # type: ignore[operator]
    close(z, torch.full((2, 3), 512**0.5, dtype=torch.float64))


@every_map
def test_in_float16_the_products_of_the_backward_may_overflow(map_: Map) -> None:
    # u·x with u = Wᵀg of some 500 and x of some 300: the products are above 65,504 and made every gradient −inf.
    x, weight, bias = map_.tensors(512, 512, 3, dtype=torch.float16)
    x = (300 * x.detach()).requires_grad_()
    weight = (1 + 0.1 * weight.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    (actual,), (wanted,) = (gradients(f, torch.ones_like(f), x) for f in (z, expected))
    scale = 512 * float(300 * 512**0.5) ** -1  # of t·u: the gradient itself is a difference of such
    close(actual, wanted, scale=scale)


@every_map
def test_in_float16_the_products_of_the_backward_may_be_too_small(map_: Map) -> None:
    # u·x of 1e-4 and 1e-4 is 0 in float16, and the radial part then stayed in the gradient of the norm-like maps.
    x, weight, bias = map_.tensors(8, 4, 2, dtype=torch.float16)
    x = (1e-4 * x.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    upstream = 1e-4 * torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).half()
    (actual,), (wanted,) = (gradients(f, upstream.to(f.dtype), x) for f in (z, expected))
    close(actual, wanted, tolerance=5e-3)


@every_map
@pytest.mark.parametrize("d_out", [4, 64])
def test_in_float16_small_gradients_of_long_rows_are_not_flushed_to_zero(map_: Map, d_out: int) -> None:
    # s·g of 1e-3 and 1e-5 is 0 in float16; g·(s x) is not.
    x, weight, bias = map_.tensors(16, d_out, 4, dtype=torch.float16)
    x = (250 * x.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    assert z.detach().abs().max() > 0.1
    upstream = torch.full_like(z, 1e-5)
    for actual, wanted in zip(
        gradients(z, upstream, weight, bias), gradients(expected, upstream.double(), weight, bias), strict=True
    ):
        assert actual.abs().max() > 0
        close(actual, wanted, tolerance=TOLERANCE[torch.float16], scale=wanted.abs().max().item() + 2.0**-24 / TOLERANCE[torch.float16])


def test_in_float16_scales_too_small_for_the_dtype_still_add_up_in_the_bias_gradient() -> None:
    # s = 2.1e-6 is 35.5 of float16's smallest steps: rounded to one of them, the sum over all rows is off by 1.3 %.
    x, weight = torch.full((4096, 64), 59000.0).half(), torch.zeros(2, 64).half()
    bias = torch.zeros(2).half().requires_grad_()
    z = affine_like_linear(x, weight, bias)
    (actual,) = gradients(z, torch.ones_like(z), bias)
    close(actual, torch.full((2,), 4096 / (64 * float(x[0, 0]) ** 2 + 1) ** 0.5, dtype=torch.float64))


def test_in_bfloat16_the_one_under_the_root_counts() -> None:
    # 257 + 1 is 256 and 0.001 + 1 is 1 in bfloat16: the two scales would be off by 0.4 % and 0.05 %, seen after 16 bit only in W.
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    for value in (2.0**-5, 1.0, 16.0):
        row = torch.full((1, 1), value, dtype=torch.bfloat16)
        exact = value / (value * value + 1) ** 0.5
        assert affine_like_linear(row, one).item() == torch.tensor(exact, dtype=torch.float64).bfloat16().item()


def test_in_bfloat16_many_small_values_add_up() -> None:
    # 4096 squares of 1/64 are 1; added one by one in bfloat16 the sum stops at 1/16 or so.
    x = torch.full((1, 4096), 2.0**-6, dtype=torch.bfloat16)
    weight = torch.zeros(1, 4096, dtype=torch.bfloat16)
    weight[0, 0] = 64.0
    close(affine_like_linear(x, weight), torch.tensor([[0.5**0.5]], dtype=torch.float64), tolerance=2.0**-8)
    close(norm_like_linear(x, weight), torch.tensor([[1.0]], dtype=torch.float64), tolerance=2.0**-8)


@half_precision
def test_an_eps_that_sixteen_bits_round_to_zero_still_keeps_a_zero_row_finite(dtype: torch.dtype) -> None:
    # 1e-12 is 0 in float16, and 0/0 was NaN.
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    z = norm_like_linear(x, torch.ones(2, 3, dtype=dtype), torch.full((2,), 0.5, dtype=dtype), eps=1e-12)
    assert torch.equal(z, torch.full((2, 2), 0.5, dtype=dtype))
    (1e-4 * z.sum()).backward()
    assert x.grad is not None
    close(x.grad, torch.full((2, 3), 2 * float(torch.tensor(1e-4, dtype=dtype)) * 1e6, dtype=torch.float64))


@every_kind
@half_precision
@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_a_model_in_sixteen_bits_agrees_with_itself_in_float32(map_: Map, dtype: torch.dtype, length: float) -> None:
    # Rows of 1e-3: an ε that followed the dtype (0.0078 in bfloat16) would shrink them 30 times.
    x, weight, bias = map_.tensors(16, 8, 5, dtype=dtype)
    x = (length * x).detach()
    widened = [None if t is None else t.detach().float() for t in (x, weight, bias)]
    close(map_(x, weight, bias), map_(*widened))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("value", [1e-20, 1e-12, 1e12, 1e18])
def test_float32_rows_of_extreme_length_give_the_definition(function: object, value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (value * torch.randn(3, 4, generator=generator)).requires_grad_()
    weight = torch.randn(5, 4, generator=generator).requires_grad_()
    z, expected = (function(t, weight.to(t.dtype)) for t in (x, x.double()))  # type: ignore[operator]
    close(z, expected)
    actual_gradients, wanted_gradients = (gradients(f, torch.ones_like(f), x, weight) for f in (z, expected))
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("length", [1e-21, 1e-16, 1e-8])
def test_a_norm_like_row_without_eps_has_its_gradient_however_short_it_is(length: float) -> None:
    # s² is 1e42 there, beyond float32: the gradient of 1e21 was inf.
    x = torch.tensor([[0.6, -0.8]], dtype=torch.float64).mul(length).float().requires_grad_()
    weight = torch.tensor([[2.0, 1.0], [0.5, -3.0]])
    norm_like_linear(x, weight, eps=0.0).sum().backward()
    u = weight.double().sum(0)
    direction = torch.tensor([0.6, -0.8], dtype=torch.float64)
    assert x.grad is not None
    close(x.grad[0], (u - (u @ direction) * direction) / length, tolerance=1e-2 if length < 1e-20 else 1e-5)


@both
def test_a_float32_row_whose_squared_norm_overflows_gives_zero_and_no_gradient(function: object) -> None:
    x = torch.tensor([[1e20, -1e20], [3.0, 4.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 2.0], [1.0, 1.0], [0.0, 1.0]], requires_grad=True)
    z: Tensor = function(x, weight)  # type: ignore[operator]
    z.sum().backward()
    assert not z[0].any()
    assert x.grad is not None
    assert weight.grad is not None
    assert not x.grad[0].any()
    alone = weight.detach().clone().requires_grad_()
    function(x[1:].detach(), alone).sum().backward()  # type: ignore[operator]
    assert alone.grad is not None
    close(weight.grad, alone.grad)


def test_float64_is_not_narrowed() -> None:
    x = torch.tensor([[1.0 + 1e-12]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    assert affine_like_linear(x, one).item() != affine_like_linear(one, one).item()
    large = norm_like_linear(torch.tensor([[3e30, 4e30]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64))
    close(large, torch.tensor([[1.4]], dtype=torch.float64))


def test_the_eps_of_none_is_float32s_in_every_dtype() -> None:
    for dtype in TOLERANCE:
        x = torch.full((1, 1), 2.0**-12, dtype=dtype)
        wanted = 2.0**-12 / (2.0**-24 + FLOAT32_EPS) ** 0.5
        close(norm_like_linear(x, torch.ones(1, 1, dtype=dtype)), torch.tensor([[wanted]], dtype=torch.float64))


@every_map
def test_the_bias_gradient_of_many_rows_is_as_exact_as_that_of_a_linear_layer(map_: Map) -> None:
    if not map_.bias:
        pytest.skip("has none")
    x, weight, bias = map_.tensors(4, 3, 70_000, dtype=torch.float32)
    map_(x, weight, bias).backward(torch.ones(70_000, 3))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    map_(*doubles).backward(torch.ones(70_000, 3, dtype=torch.float64))
    torch.testing.assert_close(bias.grad.double(), doubles[2].grad, rtol=2e-6, atol=0.0)
