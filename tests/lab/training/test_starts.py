# Starts, gains, optimisers and schedules: a stacked trial equals the one that plain modules and torch.optim train.
from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from solo import solo_net, train_solo

from affine_divergence.lab.data import Part, Splits, load, make_splits
from affine_divergence.lab.training import _conv_stack, _stack
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.training._train import descend, make_stack, train
from affine_divergence.lab.trial import FULLY_CONNECTED, GAINED, GRADIENT_ONLY, Activation, Start, Trial

STEPS = 20  # more than an epoch of 18, whose last minibatch is short
DAMPINGS = {"batch": 0.3, "foof": 1.0}
CONVOLUTIONAL = ("none", "batch-norm", "rms-norm-sample", "norm-like", "affine-like")
SMALL_RATE = {"sgd": 0.02, "adamw": 1e-3}


@pytest.fixture(scope="module")
def digits() -> Splits:
    splits = make_splits(load("digits"))
    parts = {name: Part(getattr(splits, name).inputs.double(), getattr(splits, name).labels) for name in ("train", "validation", "test")}
    return replace(splits, **parts)


def trials_of(optimizer: str, activation: str, schedule: str, pattern: str | None = None) -> list[Trial]:
    """A trial for every method and start that it has, and one for a gain of its own."""
    fields = {
        "data": "digits",
        "width": 16,
        "depth": 3 if pattern is None else 2,
        "pattern": pattern,
        "activation": activation,
        "batch_size": 64,
        "learning_rate": SMALL_RATE[optimizer],
        "steps": STEPS,
        "optimizer": optimizer,
        "weight_decay": 0.1 if optimizer == "adamw" else 0.0,
        "schedule": schedule,
    }
    found = []
    for method in FULLY_CONNECTED if pattern is None else CONVOLUTIONAL:
        starts = [start for start in get_args(Start) if start != "hidden-gain" or method not in ("none", *GRADIENT_ONLY)]
        found += [Trial(method=method, start=start, damping=DAMPINGS.get(method), seed=1, **fields) for start in starts]
        if method in GAINED:
            found += [Trial(method=method, gain=gain, seed=2, **fields) for gain in (0.7, "auto")]
    return found


def stacked(trials: list[Trial], splits: Splits) -> tuple[torch.Tensor, torch.Tensor]:
    stack = make_stack(trials, splits.shape, splits.classes, splits.train.inputs)
    orders = torch.stack([image_order(seed, 0, len(splits.train.inputs)) for seed in stack.seeds])
    batches = orders.split(trials[0].batch_size, dim=1)
    losses, paces = [], [1.0 - step / STEPS if trials[0].schedule == "linear" else 1.0 for step in range(STEPS)]
    order = [torch.stack([image_order(seed, 1, len(splits.train.inputs)) for seed in stack.seeds]).split(trials[0].batch_size, dim=1)]
    for batch, pace in zip([*batches, *order[0]], paces, strict=False):
        losses.append(descend(stack, splits.train.inputs, splits.train.labels, [batch], [pace]))
    return torch.stack(losses), stack.predict(splits.test.inputs)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "activation", "pattern"),
    [
        ("sgd", "linear", "tanh", None),
        ("sgd", "constant", "leaky-relu", None),
        ("adamw", "constant", "tanh", None),
        ("adamw", "linear", "leaky-relu", None),
        ("sgd", "linear", "leaky-relu", "k3s2"),
        ("adamw", "constant", "tanh", "k3s2"),
    ],
)
def test_stack_matches_plain_modules_and_torch_optim(
    optimizer: str, schedule: str, activation: str, pattern: str | None, digits: Splits
) -> None:
    trials = trials_of(optimizer, activation, schedule, pattern)
    groups = [trials] if pattern is None else [[one for one in trials if one.method == method] for method in CONVOLUTIONAL]
    for group in groups:
        group = sorted(group, key=_conv_stack.sort_key if pattern else _stack.sort_key)
        losses, predictions = stacked(group, digits)
        for place, one in enumerate(group):
            net, expected = train_solo(one, digits, STEPS)
            message = f"{one.method} {one.start} {one.gain}"
            expected_losses, own = torch.tensor(expected, dtype=torch.float64), net.eval()(digits.test.inputs).detach()
            for found, wanted, tolerance in ((losses[:, place], expected_losses, 1e-8), (predictions[place], own, 1e-6)):
                torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.1 * tolerance, msg=lambda m, said=message: f"{said}: {m}")


@pytest.mark.parametrize("pattern", [None, "k3s2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_kept_replicas_go_on_as_if_alone(optimizer: str, pattern: str | None, digits: Splits) -> None:
    trials = trials_of(optimizer, "tanh", "constant", pattern)
    trials += [one.model_copy(update={"seed": 5, "learning_rate": 0.5 * one.learning_rate}) for one in trials[::2]]
    groups = [trials] if pattern is None else [[one for one in trials if one.method == method] for method in ("batch-norm", "affine-like")]
    for group in groups:
        group = sorted(group, key=_conv_stack.sort_key if pattern else _stack.sort_key)
        kept = [place for place in range(len(group)) if place % 3 != 1]
        predictions = []
        for members, drop in ((group, True), ([group[place] for place in kept], False)):
            stack = make_stack(members, digits.shape, digits.classes, digits.train.inputs)
            for epoch in range(2):
                orders = torch.stack([image_order(seed, epoch, len(digits.train.inputs)) for seed in stack.seeds])
                descend(stack, digits.train.inputs, digits.train.labels, orders.split(32, dim=1)[:15])
                if drop and epoch == 0:
                    stack.keep(kept)
            predictions.append(stack.predict(digits.test.inputs))
        torch.testing.assert_close(predictions[0], predictions[1], rtol=1e-8, atol=1e-9)


def test_dropping_the_last_minibatch_skips_its_images(digits: Splits) -> None:
    fields = {"data": "digits", "method": "none", "width": 4, "depth": 1, "activation": "tanh", "learning_rate": 0.1, "seed": 3}
    images = len(digits.train.inputs)  # 1149: 4 minibatches of 256, and 125 images
    short, dropped = (Trial(batch_size=256, epochs=1, drop_last=drop, **fields) for drop in (False, True))
    exact = Trial(batch_size=256, steps=4, **fields)
    results = {name: train([one], digits)[0] for name, one in (("short", short), ("dropped", dropped), ("exact", exact))}
    assert images % 256
    assert results["dropped"].loss_curve == results["exact"].loss_curve
    assert results["short"].loss_curve != results["exact"].loss_curve
    with pytest.raises(ValueError, match="leave no minibatch of 1149 training images"):
        train([Trial(batch_size=2000, epochs=1, drop_last=True, **fields)], digits)


def test_pixels_are_standardised_by_their_own_mean_and_deviation(digits: Splits) -> None:
    by_pixel = digits.by_pixel
    inputs = by_pixel.train.inputs
    varies = digits.train.inputs.std(0) > 0.0
    torch.testing.assert_close(inputs.mean(0), torch.zeros_like(inputs[0]), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(inputs.std(0, correction=0)[varies], torch.ones_like(inputs[0])[varies], rtol=1e-9, atol=0.0)
    assert not varies.all()
    assert torch.equal(inputs[:, ~varies], torch.zeros_like(inputs[:, ~varies]))
    mean, deviation = digits.train.inputs.mean(0), digits.train.inputs.std(0, correction=0)
    expected = (digits.test.inputs - mean)[:, varies] / deviation[varies]
    torch.testing.assert_close(by_pixel.test.inputs[:, varies], expected, rtol=1e-9, atol=1e-12)
    fields = {"method": "none", "width": 4, "depth": 1, "activation": "tanh", "learning_rate": 0.1, "seed": 3}
    fields |= {"batch_size": 32, "epochs": 1}
    by_channel, trained = (train([Trial(data="digits", standardise=how, **fields)], digits)[0] for how in ("channel", "pixel"))
    directly = train([Trial(data="digits", **fields)], by_pixel)[0]
    assert trained.loss_curve == directly.loss_curve != by_channel.loss_curve


@pytest.mark.parametrize("signal", [0.1, 4.0])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("method", ["none", "batch-norm", "layer-norm", "rms-norm", "norm-like", "affine-like"])
def test_fixed_point_start_keeps_the_squared_norm_of_rows(method: str, activation: str, signal: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 300, generator=generator, dtype=torch.float64)
    found = []
    for seed in range(4):
        trial = Trial(
            data="digits",
            method=method,
            width=256,
            depth=4,
            activation=activation,
            batch_size=32,
            learning_rate=1.0,
            seed=seed,
            epochs=1,
            start="fixed-point",
            signal=signal,
        )
        net, squares, a = solo_net(trial, 300, 256).double(), [], x
        for layer in net:
            a = layer(a).detach()
            if isinstance(layer, torch.nn.Tanh | torch.nn.LeakyReLU):
                squares.append(a.square().sum(1).mean())
        found.append([*squares, a.square().sum(1).mean()])  # the last layer too: it has as many outputs as a hidden one
    means = torch.tensor(found, dtype=torch.float64).mean(0) / signal
    assert means.sub(1.0).abs().max() < 0.12, means


def test_orthogonal_start_has_orthonormal_columns() -> None:
    from affine_divergence.lab.training._seeds import orthogonal_weight

    tall, wide = orthogonal_weight(3, 1, 20, 8), orthogonal_weight(3, 2, 8, 20)
    torch.testing.assert_close(tall.T @ tall, torch.eye(8, dtype=torch.float64))
    torch.testing.assert_close(wide @ wide.T, torch.eye(8, dtype=torch.float64))
    assert math.isclose(float(tall.square().mean()), 1 / 20)
