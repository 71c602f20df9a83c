# The running average of the batch-corrected layers: its definition written out, what counts in, and what keeps it.
from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import conv_oracles
import pytest
import torch
from batch_oracles import WIDE, augmented, joined
from oracles import close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from affine_divergence.nn import BatchCorrectedConv2d, BatchCorrectedLinear

D, O = 5, 3


class Definition:
    """S = Σ_t (1 − decay)·decay^(T − t) X̃_tᵀX̃_t/N_t, over the sum of these weights; ∂W̃ = gᵀX̃ (N·S + damping·trace(S)·I)⁻¹."""

    def __init__(self, decay: float, damping: float) -> None:
        self.decay, self.damping = decay, damping
        self.moments: list[Tensor] = []

    def average(self) -> Tensor:
        weights = [(1 - self.decay) * self.decay ** (len(self.moments) - 1 - t) for t in range(len(self.moments))]
        return sum(w * m for w, m in zip(weights, self.moments, strict=True)) / sum(weights)  # type: ignore[return-value]

    def count(self, rows: Tensor) -> None:
        self.moments.append(rows.mT @ rows / len(rows))

    def gradient(self, rows: Tensor, g: Tensor, *, average: Tensor | None = None, made_for: int | None = None) -> Tensor:
        s = self.average() if average is None else average
        number = len(rows) if made_for is None else made_for  # of the batch whose inverse was kept
        inverse = torch.linalg.inv(number * s + self.damping * s.trace() * torch.eye(len(s), dtype=WIDE)) * number / len(rows)
        return g.to(WIDE).mT @ rows @ inverse


def _layer(**options: Any) -> BatchCorrectedLinear:
    return BatchCorrectedLinear(D, O, dtype=WIDE, **options)


def _backward(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of [W b], and ∂L/∂z, of one batch."""
    layer.zero_grad()
    z = layer(x)
    g = torch.randn(z.shape, dtype=z.dtype)
    z.backward(g)
    return joined(layer.weight.grad, layer.bias.grad), g


@pytest.mark.parametrize("decay", [0.5, 0.95])
@pytest.mark.parametrize("rows", [[3, 3, 3], [30, 4, 11, 7]], ids=str)
def test_the_gradient_is_that_of_the_bias_corrected_average(decay: float, rows: list[int]) -> None:
    layer, definition = _layer(damping=0.01, decay=decay), Definition(decay, 0.01)
    for number in rows:
        x = torch.randn(number, D, dtype=WIDE)
        actual, g = _backward(layer, x)
        definition.count(augmented(x))
        close(actual, definition.gradient(augmented(x), g), tolerance=1e-10)


@pytest.mark.parametrize("every", [2, 3])
def test_the_inverse_is_made_at_every_so_many_backwards_and_the_average_counts_all(every: int) -> None:
    layer, definition = _layer(damping=0.01, decay=0.6, every=every), Definition(0.6, 0.01)
    for step, number in enumerate([9, 9, 4, 12, 7, 5, 8]):
        x = torch.randn(number, D, dtype=WIDE)
        actual, g = _backward(layer, x)
        definition.count(augmented(x))
        if step % every == 0:
            kept, made_for = definition.average(), number
        close(actual, definition.gradient(augmented(x), g, average=kept, made_for=made_for), tolerance=1e-9)


def test_the_first_backward_is_that_without_an_average() -> None:
    for x in (torch.randn(4, D, dtype=WIDE), torch.randn(20, D, dtype=WIDE)):
        with_average, without = _layer(decay=0.9), _layer()
        without.load_state_dict(with_average.state_dict())
        g = torch.randn(len(x), O, dtype=WIDE)
        for layer in (with_average, without):
            layer(x).backward(g)
        close(joined(with_average.weight.grad, with_average.bias.grad), joined(without.weight.grad, without.bias.grad), tolerance=1e-9)
        close(with_average.realised_share, without.realised_share)


def test_a_convolution_averages_over_its_patches() -> None:
    layer = BatchCorrectedConv2d(4, 6, 3, 2, 1, groups=2, dtype=WIDE, damping=0.01, decay=0.7)
    definitions = [Definition(0.7, 0.01), Definition(0.7, 0.01)]
    for images in (3, 1, 2):
        x = torch.randn(images, 4, 6, 7, dtype=WIDE)
        actual, g = _backward(layer, x)
        patches = conv_oracles.vectors(conv_oracles.conv_patches(x, (3, 3), (2, 2), (1, 1), (1, 1)), 2).transpose(0, 1).flatten(1, 2)
        upstream = g.flatten(2).unflatten(1, (2, 3)).permute(1, 0, 3, 2).flatten(1, 2)
        for definition, rows in zip(definitions, patches, strict=True):
            definition.count(augmented(rows))
        wanted = [d.gradient(augmented(p), u) for d, p, u in zip(definitions, patches, upstream, strict=True)]
        close(actual, torch.cat(wanted), tolerance=1e-9)


@pytest.mark.parametrize("every", [1, 2])
def test_in_eval_mode_the_average_is_used_and_not_changed(every: int) -> None:
    layer, definition = _layer(damping=0.01, decay=0.6, every=every), Definition(0.6, 0.01)
    before = torch.randn(7, D, dtype=WIDE)
    own, g = _backward(layer.eval(), before)
    alone = Definition(0.6, 0.01)
    alone.count(augmented(before))
    close(own, alone.gradient(augmented(before), g), tolerance=1e-9)  # none yet: the batch's own
    first = torch.randn(9, D, dtype=WIDE)
    _backward(layer.train(), first)
    definition.count(augmented(first))
    for _ in range(3):
        x = 5 * torch.randn(9, D, dtype=WIDE)
        actual, g = _backward(layer.eval(), x)
        close(actual, definition.gradient(augmented(x), g), tolerance=1e-9)
    for step in range(2):  # training goes on where it was
        actual, g = _backward(layer.train(), first)
        definition.count(augmented(first))
        if every == 1 or step == 1:
            close(actual, definition.gradient(augmented(first), g), tolerance=1e-9)


def test_a_backward_in_eval_mode_leaves_the_inverse_that_training_keeps() -> None:
    layer, definition = _layer(damping=0.01, decay=0.6, every=3), Definition(0.6, 0.01)
    first, x = torch.randn(9, D, dtype=WIDE), torch.randn(9, D, dtype=WIDE)
    _backward(layer, first)
    definition.count(augmented(first))
    kept = definition.average()
    layer.eval().damping = 0.5
    _backward(layer, x)
    layer.train().damping = 0.01
    actual, g = _backward(layer, x)
    close(actual, definition.gradient(augmented(x), g, average=kept), tolerance=1e-9)


def test_a_reset_forgets() -> None:
    layer, fresh = _layer(decay=0.9, every=3), _layer(decay=0.9, every=3)
    fresh.load_state_dict(layer.state_dict())
    for _ in range(2):
        _backward(layer, 9 * torch.randn(6, D, dtype=WIDE))
    layer.reset_average()
    x, g = torch.randn(8, D, dtype=WIDE), torch.randn(8, O, dtype=WIDE)
    for each in (layer, fresh):
        each.zero_grad()
        each(x).backward(g)
    assert torch.equal(layer.weight.grad, fresh.weight.grad)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_has_a_gradient_that_is_not_and_stays_out_of_the_average(value: float) -> None:
    for first in (True, False):
        layer, definition = _layer(damping=0.01, decay=0.6), Definition(0.6, 0.01)
        x = torch.randn(7, D, dtype=WIDE)
        if not first:
            _backward(layer, x)
            definition.count(augmented(x))
        spoiled = torch.randn(7, D, dtype=WIDE)
        spoiled[1, 2] = value
        assert not torch.isfinite(_backward(layer, spoiled)[0]).all()
        actual, g = _backward(layer, x)
        definition.count(augmented(x))
        close(actual, definition.gradient(augmented(x), g), tolerance=1e-9)


def test_what_is_frozen_for_a_while_is_left_out_of_the_solve_and_not_out_of_the_average() -> None:
    layer, definition = _layer(damping=0.01, decay=0.6), Definition(0.6, 0.01)
    for frozen in (None, layer.bias, layer.weight, None):
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter is not frozen)
            parameter.grad = None
        x, g = torch.randn(7, D, dtype=WIDE), torch.randn(7, O, dtype=WIDE)
        layer(x).backward(g)
        definition.count(augmented(x))
        learns = [True] * D * (frozen is not layer.weight) + [False] * D * (frozen is layer.weight) + [frozen is not layer.bias]
        s = definition.average()[learns][:, learns]
        wanted = definition.gradient(augmented(x)[:, learns], g, average=s)
        parts = [p.grad.reshape(O, -1) for p in (layer.weight, layer.bias) if p is not frozen]
        close(torch.cat(parts, 1), wanted, tolerance=1e-9)


def test_several_calls_and_micro_batches_count_each() -> None:
    layer, definition = _layer(damping=0.01, decay=0.6), Definition(0.6, 0.01)
    x = [torch.randn(7, D, dtype=WIDE) for _ in range(3)]
    for batch in x[:2]:
        layer(batch).sum().backward()
        definition.count(augmented(batch))
    (layer(x[2]) + layer(x[2])).sum().backward()
    for _ in range(2):
        definition.count(augmented(x[2]))
    actual, g = _backward(layer, x[0])
    definition.count(augmented(x[0]))
    close(actual, definition.gradient(augmented(x[0]), g), tolerance=1e-9)


def test_an_empty_batch_is_not_counted() -> None:
    layer, definition = _layer(damping=0.01, decay=0.6), Definition(0.6, 0.01)
    for number in (0, 5, 0, 6):
        x = torch.randn(number, D, dtype=WIDE)
        actual, g = _backward(layer, x)
        if number:
            definition.count(augmented(x))
            close(actual, definition.gradient(augmented(x), g), tolerance=1e-9)
        else:
            assert not actual.any()


def test_conversion_keeps_the_average_as_wide_as_it_was() -> None:
    layer = BatchCorrectedLinear(D, O, damping=0.01, decay=0.9)
    large = 1000 * torch.randn(9, D)  # squares beyond float16
    _backward(layer, large)
    x, g = large.half(), torch.randn(9, O).half()
    definition = Definition(0.9, 0.01)
    definition.count(augmented(large))
    layer.half()
    layer.zero_grad()
    layer(x).backward(g)
    definition.count(augmented(x))
    assert layer.weight.grad.dtype == torch.float16
    assert layer._average is not None
    assert layer._average.total.dtype == torch.float64
    close(layer._average.total[0] / layer._average.weight, definition.average(), tolerance=1e-6)
    close(layer.weight.grad, definition.gradient(augmented(x), g)[:, :-1], tolerance=2e-2)


def _saved(layer: Any) -> Any:
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved], ids=["deepcopy", "pickle", "save"])
def test_copies_go_on_with_the_average_each_for_itself(copied: Any) -> None:
    layer = _layer(decay=0.9, every=2)
    _backward(layer, torch.randn(9, D, dtype=WIDE))
    twin = copied(layer)
    x, g = torch.randn(9, D, dtype=WIDE), torch.randn(9, O, dtype=WIDE)
    gradients = []
    for each in (layer, twin):
        for _ in range(2):
            each.zero_grad()
            each(x).backward(g)
        gradients.append(each.weight.grad.clone())
    assert torch.equal(*gradients)
    _backward(twin, 9 * x)
    layer.zero_grad()
    twin.zero_grad()
    for each in (layer, twin):
        each(x).backward(g)
    assert not torch.allclose(layer.weight.grad, twin.weight.grad)


def test_a_layer_changed_meanwhile_is_told_to_reset() -> None:
    layer = _layer(decay=0.9)
    _backward(layer, torch.randn(9, D, dtype=WIDE))
    layer.bias = None
    with pytest.raises(RuntimeError, match=r"running average has the shape \(1, 6, 6\), this batch has \(1, 5, 5\).*reset_average"):
        layer(torch.randn(9, D, dtype=WIDE)).sum().backward()
    layer.reset_average()
    layer(torch.randn(9, D, dtype=WIDE)).sum().backward()


def test_options_set_later_are_those_used() -> None:
    layer, definition = _layer(damping=0.01, decay=0.6), Definition(0.6, 0.01)
    for step in range(4):
        x = torch.randn(7, D, dtype=WIDE)
        layer.damping = definition.damping = 0.01 * (step + 1)
        layer.every = 3  # a kept inverse of another damping is of no use
        actual, g = _backward(layer, x)
        definition.count(augmented(x))
        close(actual, definition.gradient(augmented(x), g), tolerance=1e-9)


def test_a_first_batch_that_is_not_finite_spoils_its_own_gradient_alone() -> None:
    layer, x = BatchCorrectedLinear(4, 3, decay=0.9, every=5), torch.randn(6, 4)
    finite = []
    for batch in (torch.full_like(x, math.nan), x, x):
        layer.zero_grad()
        layer(batch).sum().backward()
        finite.append(bool(torch.isfinite(layer.weight.grad).all()))
    assert finite == [False, True, True]


def test_an_inverse_is_not_kept_over_backwards_that_did_without() -> None:
    layer, other = (BatchCorrectedLinear(3, 2, decay=0.5, every=3) for _ in range(2))
    batches = [torch.randn(9, 3), *(100 * torch.randn(9, 3) for _ in range(5))]
    for batch in batches[:3]:
        layer(batch).sum().backward()
    layer.every = 1
    for batch in batches[3:5]:
        layer(batch).sum().backward()
    other.every = 1
    for batch in batches[:5]:
        other(batch).sum().backward()
    layer.every = 4
    for one in (layer, other):
        one.zero_grad()
        one(batches[5]).sum().backward()
    close(layer.weight.grad, other.weight.grad, tolerance=1e-6)


def test_an_inverse_of_an_average_of_nothing_is_not_kept() -> None:
    layer, other = BatchCorrectedLinear(6, 4, bias=False, decay=0.9, every=50), BatchCorrectedLinear(6, 4, bias=False, decay=0.9)
    x = torch.randn(8, 6)
    for one in (layer, other):
        one(torch.zeros(8, 6)).sum().backward()
        one.zero_grad()
        one(x).sum().backward()
    close(layer.weight.grad, other.weight.grad, tolerance=1e-6)


def test_a_copy_of_a_parametrised_layer_has_its_own_average_options_and_share() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(BatchCorrectedLinear(6, 4, decay=0.9))
    other = copy.deepcopy(layer)
    other.damping = 100.0
    other(torch.randn(5, 6)).sum().backward()
    assert layer.realised_share is None
    assert layer._average is None
    assert other._average is not None
    assert float(other.realised_share) < 0.05


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
def test_backward_needs_no_values_on_the_meta_device(every: int, fake: bool) -> None:
    with FakeTensorMode() if fake else torch.device("meta"):
        layers = BatchCorrectedLinear(D, O, decay=0.9, every=every), BatchCorrectedConv2d(2, 4, 3, decay=0.9, every=every)
        for layer, x in zip(layers, (torch.randn(7, D), torch.randn(2, 2, 5, 5)), strict=True):
            for training in (True, True, False, True):
                layer.train(training)
                layer(x).sum().backward()
            assert layer.weight.grad is not None
            assert layer.weight.grad.shape == layer.weight.shape
