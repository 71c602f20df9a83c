# L2Norm: its values, and what it is beside NormLikeLinear and RMSNorm.
from __future__ import annotations

import copy
import pickle

import pytest
import torch
from oracles import FLOAT32_EPS, TOLERANCE, close, l2_normalised
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from affine_divergence.nn import L2Norm, NormLikeLinear

epsilons = pytest.mark.parametrize("eps", [None, 0.0, 0.4])
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def _by_row(x: Tensor, eps: float | None) -> Tensor:
    return torch.stack([l2_normalised(row, eps) for row in x.reshape(-1, x.shape[-1])]).reshape(x.shape)


@epsilons
@dtypes
def test_every_row_is_divided_by_its_length(eps: float | None, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64).to(dtype)
    x[1, 2] = 0.0
    y = L2Norm(eps=eps)(x)
    assert y.dtype == dtype
    close(y, _by_row(x, eps))


@epsilons
def test_linear_after_it_is_the_norm_like_layer_in_values_and_gradients(eps: float | None) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    whole, linear = NormLikeLinear(5, 4, dtype=torch.float64, eps=eps), nn.Linear(5, 4, dtype=torch.float64)
    linear.load_state_dict(whole.state_dict())
    chain = nn.Sequential(L2Norm(eps=eps), linear)
    close(whole(x), chain(x))
    wanted = torch.autograd.grad(chain(x).square().sum(), [x, *linear.parameters()])
    for actual, expected in zip(torch.autograd.grad(whole(x).square().sum(), [x, *whole.parameters()]), wanted, strict=True):
        close(actual, expected)


@pytest.mark.parametrize("d", [1, 4, 37])
def test_times_root_d_it_is_rms_norm_without_parameters(d: int) -> None:
    # √d · x/√(‖x‖² + ε) = x/√(‖x‖²/d + ε/d): RMSNorm's ε is ours over d.
    x = torch.randn(6, d, dtype=torch.float64)
    close(d**0.5 * L2Norm(eps=1e-3)(x), nn.RMSNorm(d, eps=1e-3 / d, elementwise_affine=False)(x))
    close(d**0.5 * L2Norm(eps=0.0)(x), nn.RMSNorm(d, eps=0.0, elementwise_affine=False)(x))


def test_in_float16_a_row_whose_sum_of_squares_overflows_keeps_its_direction() -> None:
    close(L2Norm()(torch.full((1, 8), 100.0, dtype=torch.float16)), torch.full((1, 8), 8**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1e-3, 1.0, 200.0])
def test_in_sixteen_bits_it_is_what_it_is_in_float32(dtype: torch.dtype, length: float) -> None:
    x = (length * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    narrow, expected = L2Norm()(x), L2Norm()(wide)
    close(narrow, expected)
    upstream = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    (actual,), (wanted,) = torch.autograd.grad(narrow, x, upstream), torch.autograd.grad(expected, wide, upstream.float())
    assert actual.dtype == dtype
    close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@dtypes
def test_an_eps_that_sixteen_bits_round_to_zero_keeps_a_zero_row_zero(dtype: torch.dtype) -> None:
    assert not L2Norm(eps=1e-12)(torch.zeros(2, 3, dtype=dtype)).any()


@dtypes
def test_without_eps_a_zero_row_passes_no_gradient(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 3, dtype=dtype)
    x[0] = 1.0
    x.requires_grad_()
    L2Norm(eps=0.0)(x)[:, 0].sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert x.grad[0].any()
    assert not x.grad[1].any()


def test_a_zero_row_passes_the_gradient_over_root_eps() -> None:
    x = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    L2Norm()(x).sum().backward()
    assert x.grad is not None
    close(x.grad, torch.full((1, 3), FLOAT32_EPS**-0.5, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, in forward mode
@epsilons
def test_derivatives_agree_with_finite_differences(eps: float | None) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(L2Norm(eps=eps), x, check_forward_ad=True)
    assert gradgradcheck(L2Norm(eps=eps), x)


@epsilons
@dtypes
def test_outputs_and_gradients_do_not_depend_on_strides_bit_for_bit(eps: float | None, dtype: torch.dtype) -> None:
    x, upstream = (torch.randn(6, 64, dtype=torch.float64).to(dtype) for _ in range(2))
    results = []
    for view in (x, x.mT.contiguous().mT, torch.stack([x, x.neg()], -1).flatten(-2)[..., ::2]):
        leaf = view.detach().requires_grad_()
        y = L2Norm(eps=eps)(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, upstream)))
    for y, gradient in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(gradient, results[0][1])


@epsilons
@dtypes
def test_output_without_a_graph_is_bit_identical(eps: float | None, dtype: torch.dtype) -> None:
    for shape in ((6, 64), (2, 3, 7), (5,)):
        x = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
        y = L2Norm(eps=eps)(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(L2Norm(eps=eps)(x), y)


@epsilons
def test_derivatives_at_a_zero_row_are_finite_twice(eps: float | None) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(L2Norm(eps=eps)(x).sum(), x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(gradient.sum(), x)[0]).all()


def test_empty_batches_and_single_rows_pass() -> None:
    assert L2Norm()(torch.empty(0, 3)).shape == (0, 3)
    assert L2Norm()(torch.empty(2, 0, 3)).shape == (2, 0, 3)
    close(L2Norm(eps=0.0)(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8], dtype=torch.float64))


@epsilons
def test_it_has_no_state_and_keeps_and_shows_its_eps(eps: float | None) -> None:
    norm = L2Norm(eps=eps)
    assert norm.state_dict() == {}
    assert list(norm.parameters()) == []
    for twin in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert twin.eps == eps
        assert repr(twin) == f"L2Norm(eps={eps})"
    assert torch.equal(norm(input=torch.ones(2, 3)), norm(torch.ones(2, 3)))
