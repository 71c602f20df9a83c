# What a real gradient step on W and b does to the activations: forward, backward, step, forward again.
from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from maps import AFFINE_LIKE, Map
from oracles import affine_like_linear, close, gram, norm_like_linear
from torch import Tensor

import affine_divergence.functional as AF

LR = 0.37
ROWS, D_IN, D_OUT = 6, 5, 4


def _map(kind: str, bias: bool, gain: float) -> Map:
    if kind == "affine-like":
        return Map(kind, AF.affine_like_linear, affine_like_linear, {"gain": gain}, bias)
    return Map(kind, AF.norm_like_linear, norm_like_linear, {"gain": gain, "eps": 0.0}, bias)


def _loss(z: Tensor, rows: int) -> Tensor:
    # Not quadratic, and a mean: the law holds whatever the loss.
    target = torch.arange(rows) % z.shape[-1]
    return torch.nn.functional.cross_entropy(3 * z, target) + z.sin().mean()


def _step(map_: Map, x: Tensor, weight: Tensor, bias: Tensor | None, lr: float = LR) -> tuple[Tensor, Tensor]:
    """The change of the activations at the same x, and ∂L/∂z before the step."""
    z = map_(x, weight, bias)
    z.retain_grad()
    _loss(z, len(x)).backward()
    with torch.no_grad():
        moved = [None if p is None else p - lr * p.grad for p in (weight, bias)]
        return map_(x, *moved) - z, z.grad


def _rows(map_: Map) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Batches of one row, of lengths from 0.01 to 1000, each with fresh parameters."""
    x, *parameters = map_.tensors(D_IN, D_OUT, ROWS)
    for row, length in zip(x.detach(), torch.logspace(-2, 3, ROWS, dtype=torch.float64), strict=True):
        weight, bias = (None if p is None else p.detach().clone().requires_grad_() for p in parameters)
        assert weight is not None
        yield (length * row).unsqueeze(0), weight, bias


@pytest.mark.parametrize("gain", [1.0, 1.7, math.sqrt(D_IN + 1)])
@pytest.mark.parametrize(
    ("kind", "bias", "self_term"), [("affine-like", True, 1.0), ("norm-like", True, 2.0), ("norm-like", False, 1.0)]
)
def test_a_step_on_one_row_moves_it_by_the_same_multiple_of_its_gradient_whatever_its_length(
    kind: str, bias: bool, self_term: float, gain: float
) -> None:
    map_ = _map(kind, bias, gain)
    for x, weight, shift in _rows(map_):
        change, upstream = _step(map_, x, weight, shift)
        close(change, -LR * gain**2 * self_term * upstream, tolerance=1e-11)


@pytest.mark.parametrize("gain", [1.0, 1.7])
def test_without_a_bias_an_affine_like_row_moves_by_less_than_its_gradient(gain: float) -> None:
    map_ = _map("affine-like", False, gain)
    for x, weight, _ in _rows(map_):
        change, upstream = _step(map_, x, weight, None)
        sqnorm = float(x @ x.mT)
        assert sqnorm / (sqnorm + 1) < 1
        close(change, -LR * gain**2 * sqnorm / (sqnorm + 1) * upstream, tolerance=1e-11)


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_a_step_on_a_row_of_zeros_moves_it_by_its_gradient_through_the_bias_alone(kind: str) -> None:
    map_ = _map(kind, True, 1.7)
    _, weight, bias = map_.tensors(D_IN, D_OUT)
    before = weight.detach().clone()
    change, upstream = _step(map_, torch.zeros(1, D_IN, dtype=torch.float64), weight, bias)
    close(change, -LR * 1.7**2 * upstream, tolerance=1e-11)
    assert torch.equal(weight, before)
    assert not weight.grad.any()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_an_eps_takes_from_the_norm_like_self_term_what_it_adds_to_the_squared_norm(bias: bool) -> None:
    map_ = Map("norm-like", AF.norm_like_linear, norm_like_linear, {"eps": 0.3}, bias)
    for x, weight, shift in _rows(map_):
        change, upstream = _step(map_, x, weight, shift)
        sqnorm = float(x @ x.mT)
        close(change, -LR * (sqnorm / (sqnorm + 0.3) + bias) * upstream, tolerance=1e-11)


@pytest.mark.parametrize("gain", [1.0, 1.7])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_a_step_on_a_batch_moves_the_activations_by_minus_lr_gram_times_gradients(kind: str, bias: bool, gain: float) -> None:
    map_ = _map(kind, bias, gain)
    x, weight, shift = map_.tensors(D_IN, D_OUT, ROWS)
    change, upstream = _step(map_, x, weight, shift)
    rows = x.detach()
    if kind == "affine-like":
        augmented = torch.cat([rows, torch.ones(ROWS, 1, dtype=torch.float64)], 1)
        on_sphere = augmented / augmented.norm(dim=1, keepdim=True)
        corrected = gram(on_sphere if bias else on_sphere[:, :-1], ones=False)
    else:
        corrected = gram(rows / rows.norm(dim=1, keepdim=True), ones=bias)
    close(change, -LR * gain**2 * corrected @ upstream, tolerance=1e-11)
    if bias:
        close(corrected.diagonal(), torch.full((ROWS,), 1.0 if kind == "affine-like" else 2.0, dtype=torch.float64))


def test_a_step_on_a_plain_layer_moves_a_row_by_its_squared_norm_plus_one() -> None:
    # What is corrected, by the same measurement.
    plain = Map("plain", torch.nn.functional.linear, torch.nn.functional.linear)
    for x, weight, bias in _rows(plain):
        change, upstream = _step(plain, x, weight, bias)
        close(change, -LR * (float(x @ x.mT) + 1) * upstream, tolerance=1e-9)


@pytest.mark.parametrize("map_", AFFINE_LIKE, ids=str)
def test_a_gain_is_a_learning_rate_and_a_scale(map_: Map) -> None:
    # c · f with W, b and rate η moves as f with c W, c b and rate c² η.
    gain = map_.options.get("gain", 1.0)
    unit = Map(map_.kind, map_.function, map_.oracle, {}, map_.bias)
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    change, _ = _step(map_, x, weight, bias)
    scaled = [None if p is None else (gain * p.detach()).requires_grad_() for p in (weight, bias)]
    close(change, _step(unit, x, *scaled, lr=gain**2 * LR)[0], tolerance=1e-11)
