# Stopping trials within a stack: the others go on as if nothing had happened.
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from makers import trial

from affine_divergence.lab.data import Part, Splits, load, make_splits
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.stopping import Rung
from affine_divergence.lab.training import train
from affine_divergence.lab.trial import FULLY_CONNECTED, Trial

STRICT = (Rung(after=0.0, behind=5.0),)
RATES = (1e-6, 0.03, 0.3, 1e30)  # two of which learn


@pytest.fixture(scope="module")
def digits() -> Splits:
    splits = make_splits(load("digits"))
    parts = {name: Part(getattr(splits, name).inputs[:288], getattr(splits, name).labels[:288]) for name in ("train", "validation", "test")}
    return replace(splits, **parts)


def stopping(trials: list[Trial]) -> list[Trial]:
    return [one.model_copy(update={"stop": STRICT}) for one in trials]


def curves(outcome: Outcome) -> tuple[list[float], list[float]]:
    return outcome.loss_curve, outcome.accuracy_curve


def check(free: list[Outcome], ruled: list[Outcome]) -> None:
    """Of four rates and four epochs each, in a row: the ones that do not learn are stopped, and the curves agree to the last bit."""
    for place, (one, other) in enumerate(zip(free, ruled, strict=True)):
        epochs = other.stopped_epoch or 4
        assert str(curves(other)) == str((one.loss_curve[:epochs], one.accuracy_curve[:epochs]))  # as text NaN is NaN
        if place % 4 in (0, 3):
            assert epochs < 4
            assert (other.reason or "").startswith(f"stopped after {25 * epochs} % of its steps: ")
        if place % 4 == 3:
            assert (epochs, other.status, other.validation_accuracy) == (1, "diverged", 0.1)
            assert "not finite" in (other.reason or "")
    assert sum(outcome.stopped_epoch is None for outcome in ruled) >= len(ruled) / 4


def test_trials_that_go_on_train_bit_for_bit_as_without_the_rule(digits: Splits) -> None:
    fields: dict[str, Any] = {"role": "tuning", "epochs": 4, "depth": 1, "activation": "leaky-relu", "batch_size": 16}
    trials = [
        trial(**fields, method=method, seed=seed, learning_rate=rate, damping=1.0 if method in ("batch", "foof") else None)
        for method in FULLY_CONNECTED
        for seed in (5, 6)
        for rate in RATES
    ]
    check(train(trials, digits), train(stopping(trials), digits))


def test_convolutional_trials_go_on_bit_for_bit_whatever_their_stacks(digits: Splits) -> None:
    fields: dict[str, Any] = {"role": "tuning", "epochs": 4, "depth": 1, "width": 16, "batch_size": 8, "pattern": "k3s2"}
    fields["activation"] = "leaky-relu"
    trials = [trial(**fields, method="batch-norm", learning_rate=rate) for rate in (1e-6, 0.1, 0.3, 1e30)]
    alone = [train([one], digits)[0] for one in trials]
    ruled = train(stopping(trials), digits, together=1)
    check(alone, ruled)
    assert {outcome.stack_size for outcome in ruled} == {1}
    for one, other in zip(ruled, train(stopping(trials), digits, together=3), strict=True):
        assert one.stopped_epoch == other.stopped_epoch
        assert other.loss_curve[0] == pytest.approx(one.loss_curve[0], rel=1e-5, nan_ok=True)


def test_only_trials_of_one_cell_and_seed_are_compared(digits: Splits) -> None:
    fields: dict[str, Any] = {"role": "tuning", "epochs": 4, "stop": STRICT}
    apart = [trial(**fields, seed=5, learning_rate=1e-6), trial(**fields, seed=6), trial(**fields, method="rms-norm", seed=5)]
    assert [outcome.stopped_epoch for outcome in train(apart, digits)] == [None] * 3


def test_progress_grows_to_the_whole_also_where_trials_are_stopped(digits: Splits) -> None:
    shares: list[float] = []
    trials = [trial(role="tuning", epochs=2, learning_rate=rate, stop=STRICT) for rate in RATES]
    train(trials, digits, together=2, report=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 2 / (4 * 18)
    assert math.isclose(shares[-1], 1.0)
    assert len(shares) == 2 * 9 + 9  # of the second epoch a step of one stack only: the other has no trial left


def test_a_stopped_trial_is_charged_its_own_epochs_only(digits: Splits) -> None:
    one, _, _, wild = train([trial(role="tuning", epochs=8, learning_rate=rate, stop=STRICT) for rate in RATES], digits)[:4]
    assert one.cpu_seconds is not None
    assert wild.cpu_seconds is not None
    best = train([trial(role="tuning", epochs=8, learning_rate=0.3)], digits)[0]
    assert best.cpu_seconds is not None
    assert 0.0 < wild.cpu_seconds < best.cpu_seconds
