# A stacked convolutional trial is the same trial as plain modules, autograd and optim.SGD run it.
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from makers import trial as any_trial
from solo import train_solo

from affine_divergence.lab.data import Part, Splits, load, make_splits
from affine_divergence.lab.training import train
from affine_divergence.lab.training._conv_stack import ConvStack, sort_key
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.trial import CONVOLUTIONAL, Activation, Trial

STEPS = 20  # beyond them rounding has grown to 1e-8 with Leaky-ReLU and RMSNorm
PATTERNS = ("k3s2-k3s1", "k5s2", "k1s1-k3s1")


def trial(**fields: Any) -> Trial:
    return any_trial(**({"pattern": "k3s2-k3s1", "width": 4, "depth": 2, "learning_rate": 0.03} | fields))


@pytest.fixture(scope="module")
def digits() -> Splits:
    return make_splits(load("digits"))


@pytest.fixture(scope="module")
def double(digits: Splits) -> Splits:
    parts = {name: Part(getattr(digits, name).inputs.double(), getattr(digits, name).labels) for name in ("train", "validation", "test")}
    return replace(digits, **parts)


def run(trials: list[Trial], splits: Splits, steps: int) -> tuple[ConvStack, torch.Tensor]:
    """The stack after some steps, and its losses (K, steps)."""
    stack = ConvStack(trials, splits.shape, splits.classes, splits.train.inputs)
    orders = [image_order(seed, 0, len(splits.train.inputs)).split(trials[0].batch_size) for seed in stack.seeds]
    losses = []
    for step in range(steps):
        rows = torch.stack([order[step % len(order)] for order in orders])
        losses.append(stack.step([splits.train.inputs[of_seed] for of_seed in rows], splits.train.labels[rows]))
    return stack, torch.stack(losses, 1)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("method", CONVOLUTIONAL)
def test_every_method_rate_and_seed_has_the_losses_and_predictions_of_its_solo(
    method: str, activation: str, pattern: str, double: Splits
) -> None:
    shared = {"method": method, "activation": activation, "pattern": pattern, "depth": 3 if pattern == "k3s2-k3s1" else 2}
    # Two rates of one seed and one of another: as many images side by side as replicas.
    trials = [trial(**shared, seed=1, learning_rate=0.01), trial(**shared, seed=1), trial(**shared, seed=2)]
    # At positions that are almost blank RMSNorm multiplies rounding by 1e3 and more: to 1e-11 in 5 steps, 1e-5 in 10 and 1 in 20.
    steps = 5 if (method, activation) == ("rms-norm-position", "leaky-relu") else STEPS
    stack, losses = run(trials, double, steps)
    predictions = stack.predict(double.test.inputs)
    for replica, one in enumerate(trials):
        net, wanted = train_solo(one, double, steps)
        assert losses[replica].tolist() == pytest.approx(wanted, rel=1e-9)
        net.eval()
        torch.testing.assert_close(predictions[replica], net(double.test.inputs).detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", CONVOLUTIONAL)
def test_seeds_with_equally_many_rates_share_their_images_and_nothing_else(method: str, double: Splits) -> None:
    trials = [trial(method=method, seed=seed, learning_rate=rate) for seed in (1, 2) for rate in (0.01, 0.03)]
    stack, losses = run(trials, double, 10)
    assert stack._groups == [2, 4]
    for replica, one in enumerate(trials):
        _, wanted = train_solo(one, double, 10)
        assert losses[replica].tolist() == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("method", CONVOLUTIONAL)
def test_a_last_batch_of_one_row_is_as_in_the_solo_run(method: str, double: Splits) -> None:
    few = replace(double, train=Part(double.train.inputs[:33], double.train.labels[:33]))
    one = trial(method=method, epochs=3)
    (outcome,) = train([one], few)
    _, losses = train_solo(one, few, 6)
    assert outcome.loss_curve == pytest.approx([(32 * a + b) / 33 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-10)


@pytest.mark.parametrize("method", CONVOLUTIONAL)
def test_in_single_precision_the_losses_of_the_first_steps_are_those_of_its_solo_but_for_rounding(method: str, digits: Splits) -> None:
    one = trial(method=method, learning_rate=0.01)
    _, losses = run([one], digits, STEPS)
    _, wanted = train_solo(one, digits, STEPS)
    assert losses[0].tolist() == pytest.approx(wanted, rel=1e-5)


def test_a_diverging_trial_is_scored_as_chance_and_leaves_its_neighbours_bit_for_bit_as_they_were(digits: Splits) -> None:
    neighbours = [trial(activation="leaky-relu", seed=seed) for seed in (1, 2)]
    *beside_wild, diverged = train([*neighbours, trial(activation="leaky-relu", seed=3, learning_rate=1e9)], digits)
    *beside_tame, _ = train([*neighbours, trial(activation="leaky-relu", seed=3)], digits)
    assert (diverged.status, diverged.validation_accuracy, diverged.test_accuracy) == ("diverged", 0.1, 0.1)
    assert diverged.final_loss is not None
    assert not math.isfinite(diverged.final_loss)
    for wild, tame in zip(beside_wild, beside_tame, strict=True):
        assert replace(wild, wall_seconds=None, cpu_seconds=None) == replace(tame, wall_seconds=None, cpu_seconds=None)


def test_trials_of_two_methods_or_architectures_are_not_trained_together(digits: Splits) -> None:
    for other in (trial(method="batch-norm"), trial(pattern="k3s2"), trial(depth=3), any_trial(width=4, depth=2)):
        with pytest.raises(ValueError, match="share all but"):
            train([trial(), other], digits)


def test_the_replicas_stand_in_the_order_of_sort_key(digits: Splits) -> None:
    trials = [trial(seed=2), trial(seed=1)]
    with pytest.raises(ValueError, match="sort_key"):
        ConvStack(trials, digits.shape, digits.classes, digits.train.inputs)
    assert [one.seed for one in sorted(trials, key=sort_key)] == [1, 2]
    first, second = train(trials, digits)
    assert first.final_loss == pytest.approx(train(trials[:1], digits)[0].final_loss, rel=1e-4)
    assert second.final_loss == pytest.approx(train(trials[1:], digits)[0].final_loss, rel=1e-4)


@pytest.mark.parametrize("method", CONVOLUTIONAL)
def test_one_channel_one_position_and_one_row_can_be_trained(method: str, digits: Splits) -> None:
    one = trial(method=method, width=1, depth=4, pattern="k3s2", batch_size=1, epochs=None, steps=3)
    (outcome,) = train([one], digits)
    assert math.isfinite(outcome.final_loss or math.nan)
