# The sample correction of a linear map: its gradients row by row, in every shape and dtype, and what it leaves to torch.
from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from oracles import TOLERANCE, close
from sample_oracles import interference, sample_gradients
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from affine_divergence.gradient import sample_corrected_linear

LEARNS = {"both": (True, True), "weight": (True, False), "bias": (False, True)}
every_choice = pytest.mark.parametrize("learns", LEARNS.values(), ids=LEARNS)
every_shape = pytest.mark.parametrize("shape", [(), (6,), (2, 3), (2, 2, 3), (0,), (2, 0)], ids=str)
SIZES = [(5, 4), (3, 7), (1, 1)]  # where g is the smaller factor, where x is, and where there is one number


def _tensors(*shape: int, d_in: int = 5, d_out: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x (*shape, d_in), weight and bias as leaves that want gradients."""
    x, weight, bias = (torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in ((*shape, d_in), (d_out, d_in), (d_out,)))
    return x, weight, bias


def _freeze(weight: Tensor, bias: Tensor, learns: tuple[bool, bool]) -> list[Tensor]:
    for parameter, learning in zip((weight, bias), learns, strict=True):
        parameter.requires_grad_(learning)
    return [p for p in (weight, bias) if p.requires_grad]


def _wanted(g: Tensor, x: Tensor, learns: tuple[bool, bool]) -> list[Tensor]:
    return [grad for grad, learning in zip(sample_gradients(g, x, learns), learns, strict=True) if learning]


@every_shape
@every_choice
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_rows_part_is_divided_by_its_squared_norm(
    shape: tuple[int, ...], learns: tuple[bool, bool], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = _tensors(*shape, d_in=sizes[0], d_out=sizes[1], dtype=dtype)
    learning = _freeze(weight, bias, learns)
    z = sample_corrected_linear(x, weight, bias)
    upstream = torch.randn(z.shape).to(dtype)
    for actual, wanted in zip(torch.autograd.grad(z, learning, upstream), _wanted(upstream, x, learns), strict=True):
        assert actual.dtype == dtype
        close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@every_shape
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_input_gradients_are_bit_identical_to_torchs(
    shape: tuple[int, ...], biased: bool, autocast: torch.dtype | None, dtype: torch.dtype
) -> None:
    x, weight, bias = _tensors(*shape, dtype=dtype)
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        z, plain = (f(x, weight, bias if biased else None) for f in (sample_corrected_linear, F.linear))
    assert torch.equal(z, plain)
    assert z.dtype == plain.dtype
    (ours,), (theirs,) = (torch.autograd.grad(f, x, torch.ones_like(f).expand_as(f)) for f in (z, plain))
    assert torch.equal(ours, theirs)


def test_an_absent_bias_is_a_frozen_one() -> None:
    x, weight, bias = _tensors(6)
    absent, frozen = (torch.autograd.grad(sample_corrected_linear(x, weight, b).sin().sum(), weight) for b in (None, bias.detach()))
    close(absent[0], _wanted(F.linear(x, weight).cos(), x, (True, False))[0])
    close(frozen[0], _wanted(F.linear(x, weight, bias).cos(), x, (True, False))[0])


def test_a_frozen_weight_leaves_the_plain_gradient_of_the_bias() -> None:
    x, weight, bias = _tensors(6)
    ours, theirs = (torch.autograd.grad(f(x, weight.detach(), bias).sin().sum(), bias) for f in (sample_corrected_linear, F.linear))
    assert torch.equal(ours[0], theirs[0])


@every_choice
def test_a_zero_row_learns_through_the_bias_alone(learns: tuple[bool, bool]) -> None:
    x, weight, bias = _tensors(1)
    learning = _freeze(weight, bias, learns)
    z = sample_corrected_linear(torch.zeros_like(x), weight, bias)
    gradients = torch.autograd.grad(z, learning, torch.ones_like(z))
    wanted = [torch.zeros(4, 5), torch.ones(4)]
    for actual, expected in zip(gradients, [w for w, learning in zip(wanted, learns, strict=True) if learning], strict=True):
        assert torch.equal(actual, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_a_row_whose_squared_norm_overflows_contributes_nothing(biased: bool, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = _tensors(3, d_in=sizes[0], d_out=sizes[1], dtype=dtype)
    x = x.detach().clone()
    x[1] = 1e25
    parameters = (weight, bias) if biased else (weight,)
    z = sample_corrected_linear(x, *parameters)
    upstream = torch.randn(z.shape).to(dtype)
    kept = torch.tensor([0, 2])
    expected = sample_gradients(upstream[kept], x[kept], (True, biased))[: len(parameters)]
    for actual, wanted in zip(torch.autograd.grad(z, parameters, upstream), expected, strict=True):
        close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("norm", [1e-6, 1e-12, 1e-18, 1e-21])
def test_without_a_bias_a_very_short_row_still_contributes_what_moves_it_by_its_own_gradient(norm: float) -> None:
    # 1/‖x‖² is beyond float32 there, g xᵀ/‖x‖² is not.
    for d_out in (1, 3):
        x = torch.tensor([[0.6, 0.8]]) * norm
        weight = torch.zeros(d_out, 2, requires_grad=True)
        z = sample_corrected_linear(x, weight)
        upstream = torch.linspace(1, 5, d_out).unsqueeze(0)
        (gradient,) = torch.autograd.grad(z, weight, upstream)
        torch.testing.assert_close(gradient.double() * norm, torch.outer(upstream[0], torch.tensor([0.6, 0.8])).double(), rtol=1e-3, atol=0)


FLOAT16_FLOOR = 2.0**-24


@pytest.mark.parametrize("upstream", [1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("length", [30.0, 300.0])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_under_autocast_float32_weights_get_what_float16_would_flush_to_zero(biased: bool, length: float, upstream: float) -> None:
    x, weight, bias = _tensors(8, d_in=16, dtype=torch.float32)
    x = length * F.normalize(x.detach(), dim=1)
    parameters = (weight, bias) if biased else (weight,)
    with torch.autocast("cpu", torch.float16):
        z = sample_corrected_linear(x, *parameters)
    g = (upstream * torch.rand(z.shape)).half()
    gradients = torch.autograd.grad(z, parameters, g)
    wanted = sample_gradients(g, x, (True, biased))
    assert wanted[0].abs().median() < 4 * FLOAT16_FLOOR  # nothing that float16 could hold
    for actual, expected in zip(gradients, wanted[: len(gradients)], strict=True):
        assert actual.dtype == torch.float32
        close(actual, expected, tolerance=TOLERANCE[torch.float16])


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_in_float16_each_output_has_a_range_of_its_own_and_many_rows_do_not_overflow(biased: bool) -> None:
    x, weight, bias = _tensors(3000, d_in=8, dtype=torch.float32)
    x = x.detach().abs()
    parameters = (weight, bias) if biased else (weight,)
    with torch.autocast("cpu", torch.float16):
        z = sample_corrected_linear(x, *parameters)
    g = (torch.rand(z.shape) * torch.tensor([6e4, 1.0, 1e-5, 0.0])).half()
    gradients = torch.autograd.grad(z, parameters, g)
    for actual, expected in zip(gradients, sample_gradients(g, x, (True, biased))[: len(gradients)], strict=True):
        for of_output, wanted in zip(actual, expected, strict=True):
            close(of_output, wanted, tolerance=TOLERANCE[torch.float16])


def test_pure_float16_gradients_are_rounded_once_at_the_end() -> None:
    x, weight, bias = _tensors(8, d_in=16, dtype=torch.float16)
    x = (75 * x.detach()).requires_grad_()
    z = sample_corrected_linear(x, weight, bias)
    g = torch.full_like(z, 2e-5)
    for actual, wanted in zip(torch.autograd.grad(z, (weight, bias), g), sample_gradients(g, x, (True, True)), strict=True):
        assert actual.dtype == torch.float16
        assert (actual.double() - wanted).abs().max() <= FLOAT16_FLOOR


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_gradient_that_is_not_finite_stays_visible(dtype: torch.dtype, bad: float) -> None:
    x, weight, bias = _tensors(3, dtype=dtype)
    g = torch.ones(3, 4, dtype=dtype)
    g[1, 2] = bad
    for gradient in torch.autograd.grad(sample_corrected_linear(x, weight, bias), (weight, bias), g):
        assert not gradient[2].isfinite().any()
        assert gradient[[0, 1, 3]].isfinite().all()


def test_many_rows_lose_no_digits_of_the_bias_gradient() -> None:
    x, weight, bias = _tensors(70_000, d_in=2, d_out=3, dtype=torch.float32)
    z = sample_corrected_linear(x, weight, bias)
    (gradient,) = torch.autograd.grad(z, bias, torch.ones_like(z))
    wanted = (1 / (x.detach().double().square().sum(1) + 1)).sum()
    close(gradient, wanted.expand(3), tolerance=1e-6)


@every_choice
@pytest.mark.parametrize("rows", [1, 6])
def test_a_step_moves_every_row_by_minus_lr_its_gradient_plus_what_the_others_do(rows: int, learns: tuple[bool, bool]) -> None:
    lr = 0.37
    for length in (0.01, 1.0, 1000.0):
        x, weight, bias = _tensors(rows)
        x = length * x.detach()
        _freeze(weight, bias, learns)
        z = sample_corrected_linear(x, weight, bias)
        z.retain_grad()
        (F.cross_entropy(3 * z, torch.arange(rows) % 4) + z.sin().mean()).backward()
        with torch.no_grad():
            moved = [p if p.grad is None else p - lr * p.grad for p in (weight, bias)]
            change = F.linear(x, *moved) - z
        assert z.grad is not None
        matrix = interference(x, learns)
        assert (matrix.diagonal() - 1).abs().max() < 1e-12
        close(change, -lr * matrix @ z.grad, tolerance=1e-10)
        if rows == 1:
            close(change, -lr * z.grad, tolerance=1e-10)


def test_the_mean_of_the_loss_halves_the_step_of_the_teaching_example() -> None:
    x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [-1.0]])
    steps = {}
    for name, function in (("sample", sample_corrected_linear), ("plain", F.linear)):
        weight = torch.zeros(1, 2, requires_grad=True)
        (0.5 * (function(x, weight) - target).square()).mean().backward()
        assert weight.grad is not None
        steps[name] = F.linear(x, -weight.grad).flatten()
    torch.testing.assert_close(steps["sample"], torch.tensor([-1.0, -0.35]))
    torch.testing.assert_close(steps["plain"], torch.tensor([3.5, 1.0]))


def test_gradcheck_fails_for_the_parameters_and_passes_for_the_input() -> None:
    # They are gradients of no loss.
    x, weight, bias = _tensors(3)
    assert torch.autograd.gradcheck(lambda x: sample_corrected_linear(x, weight, bias), x)
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda w: sample_corrected_linear(x, w, bias), weight)
    with pytest.raises(GradcheckError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda b: sample_corrected_linear(x, weight, b), bias)


def test_the_correction_is_linear_in_the_loss() -> None:
    # A scaled loss, as of a GradScaler, gives scaled gradients.
    x, weight, bias = _tensors(6)
    one, scaled = (torch.autograd.grad(c * sample_corrected_linear(x, weight, bias).sin().sum(), (weight, bias)) for c in (1, 1024))
    for a, b in zip(one, scaled, strict=True):
        assert torch.equal(1024 * a, b)


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_gradients_do_not_depend_on_strides(layout: str) -> None:
    _, weight, bias = _tensors()
    numbers = torch.randn(10, 10, dtype=torch.float64)
    x = {"strided": numbers[:6, ::2], "transposed": numbers[:5, :6].mT, "expanded": numbers[:1, :5].expand(6, 5)}[layout]
    z, contiguous = sample_corrected_linear(x, weight, bias), sample_corrected_linear(x.contiguous(), weight, bias)
    upstream = torch.ones((), dtype=torch.float64).expand(6, 4)
    for actual, wanted in zip(*(torch.autograd.grad(f, (weight, bias), upstream) for f in (z, contiguous)), strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimiser_steps_on_the_corrected_gradients(optimiser: type[torch.optim.Optimizer]) -> None:
    x, weight, bias = _tensors(6)
    twins = [p.detach().clone().requires_grad_() for p in (weight, bias)]
    sample_corrected_linear(x, weight, bias).sin().sum().backward()
    for twin, gradient in zip(twins, _wanted(F.linear(x, weight, bias).cos(), x, (True, True)), strict=True):
        twin.grad = gradient.detach()
    for parameters in ([weight, bias], twins):
        optimiser(parameters, lr=0.1).step()  # type: ignore[call-arg]
    for actual, wanted in zip((weight, bias), twins, strict=True):
        close(actual, wanted)


def test_shapes_and_types_that_do_not_fit_are_named() -> None:
    x, weight, bias = _tensors(6)
    with pytest.raises(ValueError, match=r"x must have the shape \(…, 5\)"):
        sample_corrected_linear(x[:, :3], weight, bias)
    with pytest.raises(ValueError, match=r"bias must have the shape \(d_out,\) = \(4,\)"):
        sample_corrected_linear(x, weight, bias[:3])
    with pytest.raises(TypeError, match=r"x must be a real floating-point tensor, got torch\.int64"):
        sample_corrected_linear(x.long(), weight, bias)


def test_mixed_dtypes_are_refused_in_torchs_words() -> None:
    x, weight, bias = _tensors(6, dtype=torch.float32)
    for function in (sample_corrected_linear, F.linear):
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            function(x.bfloat16(), weight, bias)


def test_a_tied_weight_gets_the_sum_of_its_layers_gradients() -> None:
    x, weight, _ = _tensors(6, d_in=4)
    first = sample_corrected_linear(x, weight)
    (gradient,) = torch.autograd.grad(sample_corrected_linear(first.tanh(), weight).sum(), weight)
    hidden = F.linear(x, weight).detach().requires_grad_()
    second = F.linear(hidden.tanh(), weight)
    (upstream,) = torch.autograd.grad(second.sum(), hidden)
    parts = sample_gradients(upstream, x, (True, False))[0] + sample_gradients(torch.ones_like(second), hidden.tanh(), (True, False))[0]
    close(gradient, parts)
