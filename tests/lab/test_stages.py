# What is trained next where trials failed: the rest of the study, and an end.
from __future__ import annotations

from makers import STUDY, TINY, grid

from affine_divergence.lab.grid import Grid
from affine_divergence.lab.stages import missing
from affine_divergence.lab.trial import Trial

BATCHES = """
study = "batches"
data = "digits"
[[grid]]
method = ["none", "affine-like"]
width = 8
depth = 1
activation = "tanh"
batch_size = 32
learning_rate = [0.1, 0.3, 1.0]
seed = [0]
epochs = 1
[[grid]]
method = ["none", "affine-like"]
width = 8
depth = 1
activation = "tanh"
batch_size = [16, 64]
rate_from_batch_size = 32
seed = [0]
epochs = 1
[tuning]
seeds = [10]
"""


def walk(study: Grid, fails: object) -> tuple[set[Trial], set[Trial]]:
    """What is trained and what failed, with the middle rate the best."""
    told: dict[Trial, float] = {}
    failed: set[Trial] = set()
    for _ in range(20):
        stage = missing(study, told, failed)
        if not stage:
            return set(told), failed
        for one in stage:
            assert one not in told
            assert one not in failed
            if fails(one):  # type: ignore[operator]
                failed.add(one)
            else:
                told[one] = 0.5 - abs(one.learning_rate - 0.3)
    raise AssertionError("it does not end")


def test_a_cell_whose_tuning_failed_waits_and_all_others_are_finished_as_if_it_were_not_there() -> None:
    def fails(one: Trial) -> bool:
        return one.role == "tuning" and one.method == "none" and one.width == 5 and one.learning_rate == 0.3

    trained, failed = walk(grid(STUDY), fails)
    whole, _ = walk(grid(STUDY), lambda one: False)
    assert {one.cell for one in failed} == {one.cell for one in whole if one.method == "none" and one.width == 5}
    assert {one for one in trained if one.cell not in {f.cell for f in failed}} == {
        one for one in whole if one.cell not in {f.cell for f in failed}
    }
    assert not any(one.role == "evaluation" and one.method == "none" and one.width == 5 for one in trained)


def test_cells_that_take_a_failed_cells_rate_wait_with_it() -> None:
    trained, failed = walk(grid(BATCHES), lambda one: one.role == "tuning" and one.method == "none")
    assert failed
    assert {(one.method, one.batch_size) for one in trained if one.role == "evaluation"} == {
        ("affine-like", 16),
        ("affine-like", 32),
        ("affine-like", 64),
    }


def test_a_failed_evaluation_trial_is_left_out_and_nothing_else_is() -> None:
    trained, failed = walk(grid(TINY), lambda one: one.seed == 1 and one.method == "none")
    assert (len(trained), len(failed)) == (10, 2)
