# Trials and their keys.
from __future__ import annotations

import pytest
from makers import TINY, grid, trial
from pydantic import ValidationError

from affine_divergence.lab.tuning import plan


def test_three_spellings_of_one_learning_rate_give_one_key() -> None:
    grids = [grid(TINY.replace("[0.03, 0.3]", spelling)) for spelling in ("0.1", "1e-1", "0.10")]
    assert len({plan(one, {}).missing[0].key for one in grids}) == 1


def test_a_whole_number_is_the_same_learning_rate_as_its_float() -> None:
    assert trial(learning_rate=1).key == trial(learning_rate=1.0).key


@pytest.mark.parametrize(
    "change",
    [
        {"method": "affine-like"},
        {"width": 9},
        {"depth": 3},
        {"activation": "leaky-relu"},
        {"batch_size": 31},
        {"learning_rate": 0.2},
        {"seed": 1},
        {"epochs": 3},
        {"epochs": None, "steps": 2},
        {"data": "cifar10"},
        {"role": "tuning"},
        {"train_images": 500},
    ],
)
def test_every_field_changes_the_key(change: dict[str, object]) -> None:
    assert trial(**change).key != trial().key


def test_the_key_of_a_trial_stays_what_it_was() -> None:
    assert trial().key == "5701e05ae9885bb0"  # stores made by earlier versions are found by it


def test_trials_share_a_stack_if_and_only_if_method_rate_and_seed_are_all_that_differs() -> None:
    assert trial(method="rms-norm", learning_rate=3.0, seed=1).shared == trial().shared
    for change in ({"width": 9}, {"role": "tuning"}, {"activation": "leaky-relu"}, {"train_images": 500}):
        assert trial(**change).shared != trial().shared


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": None},
        {"steps": 5},
        {"width": 0},
        {"width": 1.5},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"learning_rate": float("inf")},
        {"method": "norm"},
        {"seed": -1},
        {"momentum": 0.9},
    ],
)
def test_what_is_no_trial_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        trial(**change)
