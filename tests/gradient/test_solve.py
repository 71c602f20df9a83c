# The solve of the batch correction where it is hard: rows that repeat, are zero, of unlike length or far from centred, at every damping.
from __future__ import annotations

import math

import pytest
import torch
from batch_oracles import augmented, joined, realised_share, ridge
from oracles import close
from torch import Tensor

from affine_divergence.gradient import batch_corrected_linear
from affine_divergence.gradient._solve import damped

DAMPINGS = [0.0, 1e-9, 1e-6, 1e-3, 1.0, 1e6]
dampings = pytest.mark.parametrize("damping", DAMPINGS)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _huge_row() -> Tensor:
    x = _randn(12, 16)
    x[3] *= 1e4
    return x


def _rounded_twice() -> Tensor:
    # Equal rows, computed in two ways: they differ in the last bit.
    x = _randn(6, 16)
    return torch.cat([x, (x * 3) * (1 / 3)])


PROBLEMS = {
    "64 rows in 8 dimensions": _randn(64, 8),
    "equal rows": _randn(4, 16).repeat(3, 1),
    "equal but for rounding": _rounded_twice(),
    "more equal rows than dimensions": _randn(3, 4).repeat(20, 1),
    "half of the inputs dead": _randn(40, 8) * torch.tensor([1.0, 0.0] * 4),
    "all inputs dead": torch.zeros(10, 16),
    "a few dead rows": _randn(12, 16) * (torch.arange(12) % 3 > 0).unsqueeze(1),
    "behind a ReLU": _randn(30, 40, seed=2).relu(),
    "a huge row": _huge_row(),
    "three directions in eight": _randn(20, 3) @ _randn(3, 8, seed=1),
    "far from centred": 1 + 0.01 * _randn(5000, 4),
    "far from centred, few": 1 + 0.01 * _randn(6, 20),
    "one row": _randn(1, 5),
}
problems = pytest.mark.parametrize("problem", PROBLEMS)


def _gradient(x: Tensor, g: Tensor, *, bias: bool, damping: float) -> Tensor:
    weight = torch.zeros(g.shape[1], x.shape[1], dtype=x.dtype, requires_grad=True)
    shift = torch.zeros(g.shape[1], dtype=x.dtype, requires_grad=True) if bias else None
    batch_corrected_linear(x, weight, shift, damping=damping).backward(g)
    return joined(weight.grad, None if shift is None else shift.grad)


@problems
@dampings
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_in_float32_the_gradient_is_the_ridge_solution_of_float64(problem: str, damping: float, bias: bool) -> None:
    x = PROBLEMS[problem]
    g = _randn(len(x), 3, seed=5)
    rows = augmented(x, bias=bias)
    cut = 0.0 if damping > 1e-4 else 1e-5  # a damping above 1e-4 sees to what rounding alone tells apart
    actual, wanted = _gradient(x, g, bias=bias, damping=damping), ridge(rows, g, damping, cut)
    dual = len(rows) <= rows.shape[1]  # where nothing is rounded to float32 but the result
    rounding = max(2e-6, 2.0**-24 * math.sqrt(len(rows)))  # of a sum over the rows
    close(actual, wanted, tolerance=2e-6 if dual else rounding * max(1.0, _loss_of_digits(rows, damping)))


def _loss_of_digits(rows: Tensor, damping: float) -> float:
    """By how much more what float32 products lose is multiplied than what they keep; 1e-4: the damping above which all is solved."""
    s = torch.linalg.svdvals(rows)
    strength = damping * s.square().sum() / len(rows)
    solved = s >= 0 if damping > 1e-4 else s > 1e-5 * s.max()
    if not solved.any() or not s.any():
        return 1.0
    s = s[solved]
    return float((s.max() / (s.square() + strength)).max() / (s / (s.square() + strength)).max())


@pytest.mark.parametrize("rows", [6, 40], ids=["dual", "primal"])
@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("length", [1e-25, 1e-12, 1e12, 1e18])
def test_rows_of_any_length_have_the_gradient_of_rows_of_length_one_over_their_length(rows: int, damping: float, length: float) -> None:
    # The squares of these lengths are beyond float32.
    x, g = _randn(rows, 8), _randn(rows, 3, seed=5)
    scaled = _gradient(length * x, g, bias=False, damping=damping)
    close(scaled * length, ridge(x.double(), g, damping), tolerance=1e-5)


@dampings
def test_dead_inputs_without_a_bias_have_a_gradient_of_zero(damping: float) -> None:
    for rows in (4, 40):
        assert not _gradient(torch.zeros(rows, 8), _randn(rows, 3), bias=False, damping=damping).any()


@pytest.mark.parametrize("rows", [6, 40], ids=["dual", "primal"])
@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "g"])
def test_what_is_not_finite_makes_a_gradient_that_is_not_finite(rows: int, damping: float, value: float, where: str) -> None:
    x, g = _randn(rows, 8), _randn(rows, 3, seed=5)
    (x if where == "x" else g)[2, 1] = value
    gradient = _gradient(x, g, bias=True, damping=damping)
    assert not torch.isfinite(gradient if where == "x" else gradient[1]).any()
    if where == "g":
        assert torch.isfinite(gradient[[0, 2]]).all()  # as torch's, one output alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [6, 40], ids=["dual", "primal"])
@pytest.mark.parametrize("damping", [0.0, 1e-3, 1.0])
def test_in_16_bit_only_the_result_is_rounded(dtype: torch.dtype, rows: int, damping: float) -> None:
    x, g = (30 * _randn(rows, 8)).to(dtype), _randn(rows, 3, seed=5).to(dtype)
    eps = torch.finfo(dtype).eps
    close(_gradient(x, g, bias=True, damping=damping), ridge(augmented(x), g, damping), tolerance=eps)


def test_one_group_that_is_zero_or_not_finite_leaves_the_others_alone() -> None:
    matrix = torch.stack([torch.eye(3), torch.zeros(3, 3), torch.full((3, 3), math.nan), 2 * torch.eye(3)]).double()
    for damping in (0.0, 0.5):
        solution = damped(matrix, 3, damping, torch.float64).solve(torch.ones(4, 3, 1, dtype=torch.float64))[:, :, 0]
        close(solution[[0, 3]], torch.full((2, 3), 1 / (1 + damping), dtype=torch.float64))
        assert torch.isfinite(solution[1]).all()
        assert torch.isnan(solution[2]).all()


@pytest.mark.parametrize("damping", [0.0, 1e-9, 1e-3])
def test_the_solution_solves_whatever_way_is_taken(damping: float) -> None:
    rows = torch.randn(20, 7, dtype=torch.float64)
    problem = damped((rows.mT @ rows)[None], 20, damping, torch.float64)
    rhs = torch.randn(1, 7, 2, dtype=torch.float64)
    close(problem.matrix @ problem.solve(rhs) + damping * problem.solve(rhs), rhs, tolerance=1e-10)
    assert realised_share(rows, rows[:, :2], ridge(rows, rows[:, :2], 0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("difference", [1e-2, 1e-3, 1e-4])
def test_rows_that_nearly_agree_move_apart_as_they_are_asked_to(difference: float) -> None:
    one = torch.randn(1, 20)
    x, g = torch.cat([one, one + difference * torch.randn(1, 20)]), torch.tensor([[1.0], [-1.0]])
    weight, bias = torch.zeros(1, 20, requires_grad=True), torch.zeros(1, requires_grad=True)
    batch_corrected_linear(x, weight, bias, damping=0.0).backward(g)
    assert weight.grad is not None
    assert bias.grad is not None
    moved = x.double() @ weight.grad.double().mT + bias.grad.double()
    close(moved, g.double(), tolerance=1e-6 / difference)  # what rounding the gradient itself to float32 leaves
