# The batch correction of a linear map: its definition in both forms, what a real step does, and the family it belongs to.
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batch_oracles import augmented, joined, realised_share, ridge
from oracles import close, gram
from torch import Tensor
from torch.nn import functional as F

from affine_divergence.gradient import _average, _batch, batch_corrected_linear, sample_corrected_linear
from affine_divergence.gradient._average import ThisBatch
from affine_divergence.gradient._batch import Batch
from affine_divergence.gradient._patch_rows import LINEAR

LR = 0.37
ROWS = {"dual": 6, "square": 9, "primal": 30}
forms = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
biased = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


def _leaves(*shape: int, o: int = 3, bias: bool = True) -> list[Any]:
    """x (*shape), weight and bias."""
    drawn = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, (o, shape[-1]), (o,))]
    return drawn if bias else [*drawn[:2], None]


def _loss(z: Tensor) -> Tensor:
    # Not quadratic, and a mean: the law holds whatever the loss.
    return (3 * z).softmax(-1)[..., 0].log().mean() + z.sin().mean()


def _step(x: Tensor, weight: Tensor, bias: Tensor | None, damping: float) -> tuple[Tensor, Tensor]:
    """The change of z by a step on what learns, and ∂L/∂z before it."""
    z = batch_corrected_linear(x, weight, bias, damping=damping)
    z.retain_grad()
    _loss(z).backward()
    assert z.grad is not None
    with torch.no_grad():
        moved = [p if p is None or p.grad is None else p - LR * p.grad for p in (weight, bias)]
        return F.linear(x, *moved) - z, z.grad  # type: ignore[arg-type]


@forms
@biased
@pytest.mark.parametrize("damping", [0.0, 1e-9, 1e-3, 1.0, 1e6])
def test_the_gradient_is_the_ridge_solution(rows: int, bias: bool, damping: float) -> None:
    x, weight, shift = _leaves(rows, 8, bias=bias)
    _, g = _step(x, weight, shift, damping)
    close(joined(weight.grad, shift.grad if bias else None), ridge(augmented(x, bias=bias), g, damping), tolerance=1e-10)


@forms
@biased
@pytest.mark.parametrize("damping", [1e-6, 1e-3, 1.0])
def test_the_dual_form_equals_the_primal_one(rows: int, bias: bool, damping: float) -> None:
    x, weight, _ = (t if t is None else t.detach() for t in _leaves(rows, 8, bias=bias))
    batch, g = Batch(LINEAR, (True, bias), damping), torch.randn(rows, 3, dtype=torch.float64)
    dual, primal = batch._dual(g, x, weight, [rows]), batch._primal(g, x, weight, rows, ThisBatch(batch.needed))
    close(dual.weight, primal.weight, tolerance=3e-9)
    close(dual.share, primal.share)
    if bias:
        close(dual.bias, primal.bias, tolerance=3e-9)


@pytest.mark.parametrize(
    ("rows", "needed", "form"),
    [
        (9, (True, True), "dual"),
        (10, (True, True), "primal"),
        (8, (True, False), "dual"),
        (9, (True, False), "primal"),
        (1, (False, True), "primal"),
    ],
)
def test_the_smaller_matrix_is_the_one_solved(
    rows: int, needed: tuple[bool, bool], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[torch.Size] = []
    monkeypatch.setattr(_batch, "damped", lambda m, *a, f=_batch.damped: solved.append(m.shape) or f(m, *a))
    monkeypatch.setattr(_average, "damped", lambda m, *a, f=_average.damped: solved.append(m.shape) or f(m, *a))
    grams: list[bool] = []
    monkeypatch.setattr(_batch, "gram", lambda *a, f=_batch.gram, **k: grams.append(True) or f(*a, **k))
    x, weight, bias = _leaves(rows, 8)
    weight.requires_grad_(needed[0])
    bias.requires_grad_(needed[1])
    batch_corrected_linear(x, weight, bias, damping=1.0).sum().backward()
    size = rows if form == "dual" else 8 * needed[0] + needed[1]
    assert solved == [(1, size, size)]
    assert grams == [True] * (form == "dual")


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_at_damping_0_up_to_d_plus_1_rows_move_by_exactly_minus_lr_times_their_gradients(rows: int) -> None:
    change, g = _step(*_leaves(rows, 8), damping=0.0)
    close(change, -LR * g, tolerance=1e-9)


@forms
@biased
@pytest.mark.parametrize("damping", [1e-3, 0.3])
def test_a_step_moves_the_rows_by_minus_lr_gram_times_its_damped_inverse_times_gradients(rows: int, bias: bool, damping: float) -> None:
    x, weight, shift = _leaves(rows, 8, bias=bias)
    change, g = _step(x, weight, shift, damping)
    matrix = gram(x.detach(), ones=bias)
    inverse = torch.linalg.inv(matrix + damping * matrix.trace() / rows * torch.eye(rows, dtype=torch.float64))
    close(change, -LR * matrix @ inverse @ g, tolerance=1e-9)


@forms
@biased
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_what_is_frozen_leaves_the_gram_matrix(rows: int, bias: bool, damping: float) -> None:
    # bias False: the weight learns alone.
    x, weight, shift = _leaves(rows, 8)
    (weight if bias else shift).requires_grad_(False)
    _, g = _step(x, weight, shift, damping)
    wanted = ridge(augmented(x, weight=not bias, bias=bias), g, damping)
    learning, frozen = (shift, weight) if bias else (weight, shift)
    assert frozen.grad is None
    close(learning.grad.reshape(wanted.shape), wanted, tolerance=1e-10)


@forms
@biased
def test_a_large_damping_gives_the_plain_gradient_over_lambda(rows: int, bias: bool) -> None:
    damping = 1e9
    x, weight, shift = _leaves(rows, 8, bias=bias)
    _step(x, weight, shift, damping)
    plain = torch.autograd.grad(_loss(F.linear(x, weight, shift)), [p for p in (weight, shift) if p is not None])
    strength = damping * augmented(x, bias=bias).square().sum() / rows
    for parameter, gradient in zip((weight, shift), plain, strict=False):
        close(parameter.grad * strength, gradient, tolerance=1e-7)


@biased
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_the_diagonal_of_the_gram_matrix_alone_gives_the_sample_correction(
    bias: bool, damping: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_batch, "gram", lambda *a, whole=_batch.gram, **k: torch.diag_embed(whole(*a, **k).diagonal(dim1=-2, dim2=-1)))
    # Rows of one length, for which λ is the same multiple of every divisor.
    x, weight, shift = _leaves(5, 8, bias=bias)
    x = torch.nn.functional.normalize(x.detach(), dim=1)
    upstream = torch.randn(5, 3, dtype=torch.float64)
    parameters = [p for p in (weight, shift) if p is not None]
    batch = torch.autograd.grad(batch_corrected_linear(x, weight, shift, damping=damping), parameters, upstream)
    sample = torch.autograd.grad(sample_corrected_linear(x, weight, shift), parameters, upstream)
    for of_batch, of_sample in zip(batch, sample, strict=True):
        close(of_batch * (1 + damping), of_sample, tolerance=1e-10)


def test_orthogonal_rows_have_the_gradient_of_the_sample_correction() -> None:
    x, weight, _ = _leaves(5, 8, bias=False)
    x = torch.linalg.qr(x.detach().mT)[0].mT * torch.arange(1.0, 6.0, dtype=torch.float64).unsqueeze(1)
    upstream = torch.randn(5, 3, dtype=torch.float64)
    (batch,) = torch.autograd.grad(batch_corrected_linear(x, weight, damping=0.0), [weight], upstream)
    (sample,) = torch.autograd.grad(sample_corrected_linear(x, weight), [weight], upstream)
    close(batch, sample, tolerance=1e-10)


def test_a_step_on_the_teaching_example_moves_the_activations_as_they_want() -> None:
    x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]).double(), torch.tensor([[1.0], [-1.0]]).double()
    for reduction, factor in ((torch.sum, 1.0), (torch.mean, 0.5)):
        changes = []
        for function in (F.linear, lambda x, w: batch_corrected_linear(x, w, damping=0.0)):
            weight = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
            reduction((function(x, weight) - target).square() / 2).backward()
            changes.append((x @ -weight.grad.mT).flatten() / factor)
        close(changes[0], torch.tensor([7.0, 2.0]).double())
        close(changes[1], torch.tensor([1.0, -1.0]).double(), tolerance=1e-9)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (4, 8), (2, 3, 8), (2, 5, 3, 8), (3, 1, 2, 2, 8)], ids=str)
@biased
def test_rows_are_all_but_the_last_axis(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, shift = _leaves(*shape, bias=bias)
    upstream = torch.randn(*shape[:-1], 3, dtype=torch.float64)
    batch_corrected_linear(x, weight, shift, damping=0.01).backward(upstream)
    rows = augmented(x.reshape(-1, 8), bias=bias)
    close(joined(weight.grad, shift.grad if bias else None), ridge(rows, upstream.reshape(-1, 3), 0.01), tolerance=1e-10)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)], ids=str)
@biased
def test_an_empty_batch_has_a_gradient_of_zero(shape: tuple[int, ...], bias: bool) -> None:
    x, weight, shift = _leaves(*shape, bias=bias)
    z = batch_corrected_linear(x, weight, shift)
    z.sum().backward()
    assert weight.grad.shape == weight.shape
    assert not weight.grad.any()
    if bias:
        close(shift.grad, torch.full((3,), 4 / 4.001 if z.numel() else 0.0, dtype=torch.float64))


def test_an_upstream_gradient_in_any_layout_is_the_same() -> None:
    x, weight, bias = _leaves(5, 8)
    upstream = torch.randn(3, 5, dtype=torch.float64)
    for g in (upstream.mT, torch.ones(1, 1, dtype=torch.float64).expand(5, 3)):
        wanted = torch.autograd.grad(batch_corrected_linear(x, weight, bias), [weight, bias], g.contiguous())
        for actual, other in zip(torch.autograd.grad(batch_corrected_linear(x, weight, bias), [weight, bias], g), wanted, strict=True):
            close(actual, other)
    strided = torch.randn(10, 16, dtype=torch.float64)[::2, ::2].requires_grad_()
    batch_corrected_linear(strided, weight, bias).sum().backward()
    close(joined(weight.grad, bias.grad), ridge(augmented(strided), torch.ones(5, 3), 1e-3), tolerance=1e-10)


def test_the_gradient_is_not_the_derivative_of_the_loss() -> None:
    x, weight, bias = _leaves(4, 8)
    assert torch.autograd.gradcheck(F.linear, (x, weight, bias))
    assert not torch.autograd.gradcheck(batch_corrected_linear, (x, weight, bias), raise_exception=False)
    assert torch.autograd.gradcheck(lambda x: batch_corrected_linear(x, weight.detach(), bias.detach()), (x,))


@forms
def test_outputs_and_input_gradients_are_bit_identical_to_torchs(rows: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in _leaves(rows, 8))
        z, plain = batch_corrected_linear(x, weight, bias), F.linear(x, weight, bias)
        assert torch.equal(z, plain)
        g = torch.randn_like(z)
        assert torch.equal(*(torch.autograd.grad(out, x, g)[0] for out in (z, plain)))


def test_each_call_is_corrected_by_its_own_rows_and_the_gradients_are_added() -> None:
    x, weight, bias = _leaves(12, 8)
    _loss(batch_corrected_linear(x[:5], weight, bias)).backward()
    first = joined(weight.grad, bias.grad)
    _loss(batch_corrected_linear(x[5:], weight, bias)).backward()
    both = joined(weight.grad, bias.grad)
    weight.grad = bias.grad = None
    (_loss(batch_corrected_linear(x[:5], weight, bias)) + _loss(batch_corrected_linear(x[5:], weight, bias))).backward()
    close(joined(weight.grad, bias.grad), both)
    close(first + ridge(augmented(x[5:]), torch.autograd.grad(_loss(z := F.linear(x[5:], weight, bias)), z)[0], 1e-3), both, tolerance=1e-9)


@pytest.mark.parametrize(
    ("damping", "error", "words"),
    [
        (-1e-3, ValueError, r"damping must be zero or positive and finite, got -0.001; .* 0.0 asks for the least-norm"),
        (math.inf, ValueError, "got inf"),
        (math.nan, ValueError, "got nan"),
        ("0.1", TypeError, "damping must be a number, got str"),
        (True, TypeError, "damping must be a number, got bool"),
        (torch.tensor(0.1), TypeError, "damping must be a number, got Tensor"),
    ],
)
def test_a_damping_that_is_none_is_refused(damping: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        batch_corrected_linear(*_leaves(4, 8), damping=damping)


def test_what_is_no_process_group_is_refused() -> None:
    with pytest.raises(TypeError, match=r"process_group must be a torch.distributed.ProcessGroup or None, got str; .*group.WORLD"):
        batch_corrected_linear(*_leaves(4, 8), process_group="gloo")  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight, bias = _leaves(4, 8)
    with pytest.raises(ValueError, match=r"x must have the shape \(…, 8\)"):
        batch_corrected_linear(x[:, :5], weight, bias)
    with pytest.raises(ValueError, match=r"bias must have the shape \(d_out,\) = \(3,\)"):
        batch_corrected_linear(x, weight, bias[:2])


def test_64_random_rows_in_8_dimensions_realise_an_eighth_of_what_they_want() -> None:
    rows, g = torch.randn(64, 8, dtype=torch.float64), torch.randn(64, 30, dtype=torch.float64)
    batch = Batch(LINEAR, (True, False), 0.0)
    share = batch.corrected(g, rows, torch.zeros(30, 8, dtype=torch.float64)).share
    assert 0.11 < share < 0.14
    assert share == pytest.approx(realised_share(rows, g, ridge(rows, g, 0.0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("damping", [0.0, 1e-9, 1e-3])
def test_rows_that_are_equal_and_want_different_things_realise_what_they_agree_on(damping: float, dtype: torch.dtype) -> None:
    rows, g = torch.randn(3, 8, dtype=dtype).repeat(2, 1), torch.randn(6, 2, dtype=dtype)
    share = Batch(LINEAR, (True, False), damping).corrected(g, rows, torch.zeros(2, 8, dtype=dtype)).share
    agreed = (g[:3] + g[3:]) / 2
    assert float(share) == pytest.approx(float(2 * agreed.square().sum() / g.square().sum()), rel=10 * damping + 1e-4)
    assert share < 0.95
