# Two-stage tuning, played through with accuracies that are functions of the learning rate.
from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from makers import TUNED, grid

from affine_divergence.lab.grid import Grid
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import Choice, Ladder, plan


def played(the_grid: Grid, accuracy: Callable[[Trial], float]) -> tuple[list[list[Trial]], dict[str, Choice]]:
    # The rounds of trials asked for until nothing is missing, and each method's choice.
    done: dict[Trial, float] = {}
    rounds: list[list[Trial]] = []
    while missing := plan(the_grid, done).missing:
        assert not set(missing) & set(done)
        rounds.append(missing)
        done |= {trial: accuracy(trial) for trial in missing}
        assert len(rounds) < 20
    return rounds, {cell.method: choice for cell, choice in plan(the_grid, done).choices.items()}


def peak(rate: float) -> Callable[[Trial], float]:
    return lambda trial: 1.0 - abs(math.log(trial.learning_rate) - math.log(rate))


def test_the_coarse_round_takes_every_second_rate_with_one_seed_and_the_fine_one_the_neighbours_with_all() -> None:
    rounds, choices = played(grid(TUNED), peak(0.09))
    first, second, third = rounds
    assert {(t.learning_rate, t.seed) for t in first} == {(0.01, 10), (0.1, 10), (1.0, 10)}
    assert {(t.learning_rate, t.seed) for t in second} == {(r, s) for r in (0.03, 0.1, 0.3) for s in (10, 11, 12)} - {(0.1, 10)}
    assert all(t.role == "tuning" for t in first + second)
    assert {(t.learning_rate, t.seed, t.role) for t in third} == {(0.1, 0, "evaluation"), (0.1, 1, "evaluation")}
    assert choices == {"none": Choice(0.1, False), "affine-like": Choice(0.1, False)}


def test_each_method_gets_the_rate_that_is_best_for_it() -> None:
    _, choices = played(grid(TUNED), lambda t: peak(0.03 if t.method == "none" else 0.3)(t))
    assert {method: choice.learning_rate for method, choice in choices.items()} == {"none": 0.03, "affine-like": 0.3}


def test_the_fine_round_goes_by_the_mean_over_its_seeds_not_by_the_first() -> None:
    def accuracy(trial: Trial) -> float:
        lucky = trial.seed == 10 and trial.learning_rate == 0.1
        return 0.9 if lucky else {0.3: 0.6}.get(trial.learning_rate, 0.4)

    _, choices = played(grid(TUNED), accuracy)
    assert choices["none"].learning_rate == 0.3


@pytest.mark.parametrize(("best", "at_edge"), [(10.0, False), (0.001, False), (1e6, True), (1e-9, True)])
def test_rates_are_extended_beyond_an_end_and_flagged_where_that_does_not_bracket_the_best(best: float, at_edge: bool) -> None:
    _, choices = played(grid(TUNED), peak(best))
    assert choices["none"].at_edge is at_edge
    assert not 0.01 <= choices["none"].learning_rate <= 1.0
    if not at_edge:
        assert choices["none"].learning_rate == pytest.approx(best)


@pytest.mark.parametrize("rates", ["[0.01, 0.03, 0.1, 0.3, 1.0, 3.0]", "[0.03, 0.1, 0.3, 1.0, 3.0]"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_chosen_rate_is_starred_if_and_only_if_no_lower_or_no_higher_one_was_tried(rates: str, stride: int) -> None:
    for extend in (0, 1, 2):
        text = TUNED.replace("[0.01, 0.03, 0.1, 0.3, 1.0]", rates).replace("[tuning]", f"[tuning]\nstride = {stride}\nextend = {extend}")
        for first, mean in itertools.product((1e-3, 0.03, 1.0, 3.0, 30.0), repeat=2):
            rounds, choices = played(grid(text), lambda t, a=first, b=mean: peak(a if t.seed == 10 else b)(t))  # type: ignore[misc]
            tried = [t.learning_rate for trials in rounds for t in trials if t.role == "tuning" and t.method == "none"]
            chosen = choices["none"]
            assert chosen.at_edge == (chosen.learning_rate in (min(tried), max(tried)))


def test_rates_that_no_number_can_continue_are_not_extended() -> None:
    text = TUNED.replace("[0.01, 0.03, 0.1, 0.3, 1.0]", "[1e-300, 1.0, 1e300]")
    for best in (1e-300, 1e300):
        _, choices = played(grid(text), peak(best))
        assert choices["none"] == Choice(best, True)


def test_the_smaller_of_two_equally_good_rates_is_taken() -> None:
    _, choices = played(grid(TUNED), lambda t: 0.5 if t.learning_rate in (0.1, 0.3) else 0.1)
    assert choices["none"].learning_rate == 0.1


def test_a_method_that_learns_at_no_rate_of_the_whole_ladder_gets_the_smallest_one_without_a_flag() -> None:
    rounds, choices = played(grid(TUNED), lambda t: 0.1 if t.method == "none" else peak(0.1)(t))
    assert choices["none"] == Choice(0.01, at_edge=False)
    tried = [[t.learning_rate for t in trials if t.method == "none" and t.role == "tuning"] for trials in rounds]
    assert tried == [[0.01, 0.1, 1.0], [0.03, 0.3], [0.01] * 2 + [0.03] * 2 + [0.1] * 2 + [0.3] * 2 + [1.0] * 2, []]


def test_a_method_that_learns_only_at_a_rate_which_the_coarse_round_leaves_out_is_found_and_tuned_there() -> None:
    _, choices = played(grid(TUNED), lambda t: 0.4 if t.learning_rate == 0.3 else 0.1)
    assert choices["none"] == Choice(0.3, at_edge=False)


def test_a_method_that_learns_with_other_tuning_seeds_than_the_first_is_tuned_by_the_mean_over_all() -> None:
    def accuracy(trial: Trial) -> float:
        return {(0.3, 11): 0.3, (0.03, 12): 0.2}.get((trial.learning_rate, trial.seed), 0.1)

    _, choices = played(grid(TUNED), accuracy)
    assert choices["none"] == Choice(0.3, at_edge=False)
    _, choices = played(grid(TUNED), lambda t: 0.3 if (t.learning_rate, t.seed) == (1.0, 12) else 0.1)
    assert choices["none"] == Choice(1.0, at_edge=False)  # 3.0 and 10.0 are tried and do not learn


def test_a_block_at_the_rate_of_another_batch_size_is_tested_at_that_rate_and_nothing_runs_twice() -> None:
    block = """
        [[grid]]
        method = ["none", "affine-like"]
        width = 8
        depth = 1
        activation = "tanh"
        batch_size = [32, 64]
        rate_from_batch_size = 64
        seed = [0, 1, 2]
        epochs = 1
    """
    text = TUNED.replace("[grid]", "[[grid]]").replace("batch_size = 64", "batch_size = [32, 64]") + block
    rounds, _ = played(grid(text), lambda t: peak(0.1 if t.batch_size == 64 else 0.3)(t))
    found = sorted((t.batch_size, t.learning_rate, t.seed) for t in rounds[-1] if t.method == "none")
    tuned, fixed = [(32, 0.3, seed) for seed in (0, 1)], [(size, 0.1, seed) for size in (32, 64) for seed in (0, 1, 2)]
    assert found == sorted([*tuned, *fixed])


def test_evaluation_waits_until_every_cell_is_tuned() -> None:
    def accuracy(trial: Trial) -> float:
        return peak(0.1 if trial.method == "none" else 100.0)(trial)

    rounds, _ = played(grid(TUNED), accuracy)
    assert [{t.role for t in trials} for trials in rounds] == [{"tuning"}] * (len(rounds) - 1) + [{"evaluation"}]


def test_a_ladder_goes_on_by_mirroring_its_ratios() -> None:
    ladder = Ladder((0.1, 0.3, 1.0))
    assert [ladder[i] for i in range(-2, 5)] == pytest.approx([0.01, 0.0333, 0.1, 0.3, 1.0, 3.33, 10.0])
    with pytest.raises(IndexError):
        ladder[5]
