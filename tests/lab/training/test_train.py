# How trials end: scores, curves, divergence, and what one trial does to its neighbours.
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from makers import trial
from solo import train_solo

from affine_divergence.lab.data import Part, Splits, load, make_splits
from affine_divergence.lab.training import train
from affine_divergence.lab.training._seeds import image_order, initial_weight
from affine_divergence.lab.trial import FULLY_CONNECTED


def in_double(splits: Splits) -> Splits:
    parts = {name: Part(getattr(splits, name).inputs.double(), getattr(splits, name).labels) for name in ("train", "validation", "test")}
    return replace(splits, **parts)


@pytest.fixture(scope="module")
def digits() -> Splits:
    return make_splits(load("digits"))


def test_accuracies_and_curves_are_those_of_the_solo_run(digits: Splits) -> None:
    one = trial(method="batch-norm", epochs=3)
    (outcome,) = train([one], digits)
    net, losses = train_solo(one, digits, 3 * 36)
    net.eval()
    for part, accuracy in ((digits.validation, outcome.validation_accuracy), (digits.test, outcome.test_accuracy)):
        assert accuracy == (net(part.inputs).argmax(-1) == part.labels).double().mean().item()
    weights = [32] * 35 + [1149 - 35 * 32]
    epochs = [sum(w * loss for w, loss in zip(weights, losses[36 * e : 36 * e + 36], strict=True)) / 1149 for e in range(3)]
    assert outcome.loss_curve == pytest.approx(epochs, rel=1e-6)
    assert outcome.final_loss == outcome.loss_curve[-1]
    assert outcome.validation_accuracy == outcome.accuracy_curve[-1]
    assert (len(outcome.accuracy_curve), outcome.status, outcome.stack_size) == (3, "done", 1)


def test_a_budget_in_steps_may_end_within_an_epoch(digits: Splits) -> None:
    (outcome,) = train([trial(epochs=None, steps=40)], digits)
    _, losses = train_solo(trial(epochs=None, steps=40), digits, 40)
    assert outcome.loss_curve[1] == pytest.approx(sum(losses[36:]) / 4, rel=1e-6)


def test_a_batch_larger_than_the_data_is_one_step_an_epoch(digits: Splits) -> None:
    (outcome,) = train([trial(batch_size=5000, epochs=2)], digits)
    _, losses = train_solo(trial(batch_size=5000, epochs=2), digits, 2)
    assert outcome.loss_curve == pytest.approx(losses, rel=1e-6)


def test_a_tuning_trial_never_sees_the_test_images(digits: Splits) -> None:
    poisoned = replace(digits, test=Part(torch.full_like(digits.test.inputs, math.nan), digits.test.labels - 99))
    tuning = trial(role="tuning")
    (outcome,) = train([tuning], poisoned)
    assert outcome.test_accuracy is None
    assert outcome.validation_accuracy == train([tuning], digits)[0].validation_accuracy


def test_a_diverging_trial_is_scored_as_chance_and_leaves_its_neighbours_bit_for_bit_as_they_were(digits: Splits) -> None:
    neighbours = [trial(method=m, activation="leaky-relu") for m in ("none", "rms-norm", "norm-like")]
    wild = trial(method="none", activation="leaky-relu", learning_rate=1e9)
    tame = trial(method="none", activation="leaky-relu", learning_rate=0.2)  # also above its neighbours': in the same place of the stack
    *beside_wild, diverged = train([*neighbours, wild], digits)
    *beside_tame, _ = train([*neighbours, tame], digits)
    assert diverged.status == "diverged"
    assert (diverged.validation_accuracy, diverged.test_accuracy) == (0.1, 0.1)
    assert diverged.final_loss is not None
    assert not math.isfinite(diverged.final_loss)
    for one, other in zip(beside_wild, beside_tame, strict=True):
        assert (one.loss_curve, one.accuracy_curve, one.test_accuracy) == (other.loss_curve, other.accuracy_curve, other.test_accuracy)
        assert one.status == "done"


def test_a_net_that_stays_at_chance_counts_as_diverged_though_its_loss_is_finite(digits: Splits) -> None:
    (outcome,) = train([trial(method="affine-like", learning_rate=1e-9)], digits)
    assert outcome.final_loss is not None
    assert math.isfinite(outcome.final_loss)
    assert outcome.status == "diverged"
    assert outcome.test_accuracy == 0.1


def test_outcomes_are_in_the_order_of_the_trials(digits: Splits) -> None:
    trials = [trial(method=m, learning_rate=r) for m, r in (("rms-norm", 0.1), ("affine-like", 1.0), ("none", 0.1), ("affine-like", 0.03))]
    together = train(trials, digits)
    for one, outcome in zip(trials, together, strict=True):
        (alone,) = train([one], digits)
        assert outcome.loss_curve == pytest.approx(alone.loss_curve, rel=1e-5)


@pytest.mark.parametrize("method", ["none", "batch-norm", "layer-norm", "rms-norm", "norm-like", "affine-like"])
def test_a_trial_beside_other_methods_is_the_trial_alone_but_for_rounding(method: str, digits: Splits) -> None:
    # The order in which a product sums depends on its width and on the CPU.
    one, splits = trial(method=method), in_double(digits)
    others = [trial(method=m) for m in ("none", "batch-norm", "layer-norm", "rms-norm", "norm-like", "affine-like") if m != method]
    together, alone = train([one, *others], splits)[0], train([one], splits)[0]
    assert together.loss_curve == pytest.approx(alone.loss_curve, rel=1e-12)
    assert together.accuracy_curve == alone.accuracy_curve


@pytest.mark.parametrize("change", [{"width": 9}, {"activation": "leaky-relu"}, {"role": "tuning"}, {"batch_size": 8}])
def test_trials_that_do_not_go_together_are_refused(change: dict[str, object], digits: Splits) -> None:
    with pytest.raises(ValueError, match="share all but learning rate, seed, start and perhaps method"):
        train([trial(), trial(**change)], digits)


def test_only_the_first_train_images_are_used_and_more_than_there_are_is_refused(digits: Splits) -> None:
    few = replace(digits, train=Part(digits.train.inputs[:100], digits.train.labels[:100]))
    (outcome,), (expected,) = train([trial(train_images=100)], digits), train([trial()], few)
    assert (outcome.loss_curve, outcome.test_accuracy) == (expected.loss_curve, expected.test_accuracy)
    with pytest.raises(ValueError, match="train_images = 1150, but the training part of digits has 1149"):
        train([trial(train_images=1150)], digits)


def test_seeds_trained_together_are_those_trained_alone(digits: Splits) -> None:
    trials = [trial(method=method, seed=seed) for seed in (3, 1, 2) for method in ("batch-norm", "layer-norm", "affine-like")]
    for one, outcome in zip(trials, train(trials, digits), strict=True):
        (alone,) = train([one], digits)
        assert outcome.loss_curve == pytest.approx(alone.loss_curve, rel=1e-5), one
        assert outcome.test_accuracy == pytest.approx(alone.test_accuracy, abs=0.01)
        assert outcome.stack_size == 9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_on_a_gpu_the_trials_are_those_on_the_cpu(digits: Splits) -> None:
    splits = in_double(digits)
    trials = [trial(method=method, seed=seed) for seed in (1, 2) for method in FULLY_CONNECTED]
    for one, here, there in zip(trials, train(trials, splits), train(trials, splits, "cuda"), strict=True):
        assert there.loss_curve == pytest.approx(here.loss_curve, rel=1e-9), one
        assert there.accuracy_curve == pytest.approx(here.accuracy_curve, abs=0.01), one


def test_a_seed_fixes_weights_by_their_shape_and_orders_by_their_epoch() -> None:
    assert torch.equal(initial_weight(3, 1, 16, 8), initial_weight(3, 1, 16, 8))
    assert not torch.equal(initial_weight(3, 1, 16, 8), initial_weight(4, 1, 16, 8))
    assert not torch.equal(initial_weight(3, 1, 16, 16), initial_weight(3, 2, 16, 16))
    assert torch.equal(image_order(3, 0, 50), image_order(3, 0, 50))
    assert not torch.equal(image_order(3, 0, 50), image_order(3, 1, 50))
    assert sorted(image_order(3, 0, 50).tolist()) == list(range(50))


def test_initial_weights_are_distributed_as_those_of_a_torch_linear_layer() -> None:
    weight = initial_weight(0, 0, 400, 300)
    assert weight.abs().max().item() <= 1 / 20
    assert weight.std().item() == pytest.approx(1 / 20 / 3**0.5, rel=0.01)
    assert weight.mean().item() == pytest.approx(0.0, abs=5e-4)
