# The fields of trials and grids that say how a net starts and is stepped: combinations, refusals, keys, and tables of before they came.
from __future__ import annotations

from pathlib import Path

import pytest
from makers import TINY, grid, record, trial
from pydantic import ValidationError

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet, to_frame
from affine_divergence.lab.grid import grid_of
from affine_divergence.lab.tuning import plan

BLOCK = TINY.replace('method = ["none", "affine-like"]', 'method = ["batch-norm", "affine-like"]')


def cells(block: str) -> set[tuple[object, ...]]:
    return {(t.method, t.start, t.gain, t.signal, t.optimizer, t.weight_decay) for t in plan(grid(block), {}).missing}


def test_gain_is_combined_with_corrections_only() -> None:
    found = cells(BLOCK + 'gain = [1.0, "auto"]\n')
    assert {(method, gain) for method, _, gain, *_ in found} == {("batch-norm", None), ("affine-like", 1.0), ("affine-like", "auto")}


def test_signal_is_combined_with_the_fixed_point_only() -> None:
    found = cells(BLOCK + 'start = ["torch", "fixed-point"]\nsignal = [0.5, 2.0]\n')
    assert {(start, signal) for _, start, _, signal, *_ in found} == {("torch", None), ("fixed-point", 0.5), ("fixed-point", 2.0)}


def test_weight_decay_is_combined_with_adamw_only() -> None:
    found = cells(BLOCK + 'optimizer = ["sgd", "adamw"]\nweight_decay = [0.0, 0.01]\n')
    assert {(optimizer, decay) for *_, optimizer, decay in found} == {("sgd", 0.0), ("adamw", 0.0), ("adamw", 0.01)}


def test_fixed_point_signal_defaults_to_one() -> None:
    assert trial(start="fixed-point") == trial(start="fixed-point", signal=1.0)
    assert {signal for _, _, _, signal, *_ in cells(BLOCK + 'start = "fixed-point"\n')} == {1.0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('start = "hidden-gain"\nmethod = "none"', "none has no start hidden-gain"),
        ('gain = "auto"\nmethod = "none"', "gain goes with the methods norm-like and affine-like"),
        ("gain = 0.0\nmethod = 'affine-like'", "grid.gain"),
        ('gain = "big"\nmethod = "affine-like"', "grid.gain"),
        ("signal = 2.0\nmethod = 'none'", "signal goes with the start fixed-point"),
        ("start = 'fixed-point'\nsignal = 8.0\nmethod = 'none'", "8 of them cannot have the squared norm signal = 8; want less"),
        ("weight_decay = 0.1\nmethod = 'none'", "weight_decay goes with optimizer adamw"),
        ("optimizer = 'adam'\nmethod = 'none'", "grid.optimizer: input should be 'sgd' or 'adamw', got 'adam'"),
    ],
)
def test_impossible_combination_is_refused_with_the_reason(line: str, said: str) -> None:
    text = TINY.replace('method = ["none", "affine-like"]\n', "") + line
    with pytest.raises(BadInputError) as caught:
        grid(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"gain": 2.0},
        {"method": "norm-like-gain", "pattern": "k3s2", "start": "xavier"},
        {"method": "sample", "start": "hidden-gain"},
        {"signal": 1.0},
        {"weight_decay": 0.1},
    ],
)
def test_trial_refuses_a_field_it_does_not_have(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"gain|signal|weight_decay|hidden-gain"):
        trial(**fields)


def test_new_fields_leave_the_keys_of_older_trials() -> None:
    assert trial().key == "5701e05ae9885bb0"
    changes: list[dict[str, object]] = [
        {"start": "xavier"},
        {"optimizer": "adamw"},
        {"schedule": "linear"},
        {"standardise": "pixel"},
        {"drop_last": True},
        {"method": "affine-like", "gain": "auto"},
        {"method": "affine-like", "gain": 3.0},
    ]
    assert len({trial().key, *(trial(**change).key for change in changes)}) == 1 + len(changes)


def test_table_keeps_gains_as_numbers_and_words() -> None:
    trials = [trial(method="affine-like", gain=gain, start="orthogonal", seed=9) for gain in ("auto", 0.5, None)]
    text, records, _ = from_frame(to_frame([record(one) for one in trials], "tiny", BLOCK))
    assert text == BLOCK
    assert {one.trial for one in records} == set(trials)


def test_table_without_the_new_columns_holds_their_defaults(tmp_path: Path) -> None:
    frame = to_frame([record(trial(seed=seed)) for seed in range(2)], "tiny", TINY)
    later = ["start", "gain", "signal", "optimizer", "weight_decay", "schedule", "standardise", "drop_last"]
    frame.drop(later).write_parquet(tmp_path / "trials.parquet")
    _, records, _ = from_frame(read_parquet(tmp_path / "trials.parquet"))
    assert {one.trial for one in records} == {trial(seed=seed) for seed in range(2)}


def test_grid_drops_the_last_minibatch_unless_its_study_did_not() -> None:
    assert all(one.drop_last for one in plan(grid(TINY), {}).missing)
    older = grid_of(TINY, "grid.toml", [trial()])
    assert not any(one.drop_last for one in plan(older, {}).missing)
    assert grid_of(TINY, "grid.toml", [trial(drop_last=True)]) == grid_of(TINY, "grid.toml", []) == grid(TINY)


def test_grid_file_says_whether_the_last_minibatch_is_dropped() -> None:
    kept = grid("drop_last = false\n" + TINY)
    assert not any(one.drop_last for one in plan(kept, {}).missing)
    with pytest.raises(BadInputError, match="drop_last: input should be a valid boolean, got 1"):
        grid("drop_last = 1\n" + TINY)
