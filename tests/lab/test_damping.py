# The damping of batch and foof: which trials have one, how it is tuned beside the learning rate, and how a report tells it.
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars
import pytest
from makers import TUNED, grid, record, trial
from pydantic import ValidationError

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.forecast import forecast
from affine_divergence.lab.frame import from_frame, read_parquet, to_frame
from affine_divergence.lab.report import write_report
from affine_divergence.lab.report._tables import chosen_rate, flags_of
from affine_divergence.lab.status import middling
from affine_divergence.lab.store import Record
from affine_divergence.lab.study import scores
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import Choice, plan

DAMPED = TUNED.replace('["none", "affine-like"]', '["none", "batch"]').replace("seed = [0, 1]", "seed = [0, 1]\ndamping = [0.1, 1.0, 10.0]")
UNTUNED = DAMPED.split("[tuning]")[0]


def peak(damping: float, rate: float = 0.1) -> Callable[[Trial], float]:
    # The best rate grows with the damping, as that of a ridge solution does.
    def accuracy(one: Trial) -> float:
        if one.damping is None:
            return 0.5
        best = rate * (one.damping / damping) ** 0.5
        return 0.9 - 0.1 * abs(math.log10(one.damping / damping)) - 0.01 * abs(math.log10(one.learning_rate / best))

    return accuracy


def played(text: str, accuracy: Callable[[Trial], float]) -> tuple[list[Record], dict[str, Choice]]:
    done: list[Record] = []
    while missing := plan(grid(text), scores(done)).missing:
        done += [record(one, accuracy(one) + 1e-4 * one.seed) for one in missing]
    return done, {cell.method: choice for cell, choice in plan(grid(text), scores(done)).choices.items()}


def test_a_damping_goes_with_batch_and_foof_alone() -> None:
    for method in ("batch", "foof"):
        assert trial(method=method, damping=0.1).damping == 0.1
        with pytest.raises(ValidationError, match=f"{method} needs a damping"):
            trial(method=method)
    for method in ("none", "sample", "affine-like"):
        with pytest.raises(ValidationError, match=f"{method} has no damping"):
            trial(method=method, damping=0.1)
    with pytest.raises(ValidationError, match="is no method of convolutional nets"):
        trial(method="batch", damping=0.1, pattern="k3s2")


def test_a_damping_changes_the_key_and_not_what_a_stack_shares() -> None:
    one, other = trial(method="batch", damping=0.1), trial(method="batch", damping=0.2)
    assert one.key != other.key
    assert one.cell == other.cell
    assert one.shared == other.shared == trial().shared


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("damping = [0.1, 1.0, 10.0]", "", "batch needs a damping: give values such as"),
        ('"batch"]', '"sample"]', "damping goes with the methods batch and foof"),
        ("[0.1, 1.0, 10.0]", "[1.0, 0.1]", "damping must ascend where it is tuned"),
        ("[0.1, 1.0, 10.0]", "[0.1, 0.1]", "damping holds a value twice"),
        ("[0.1, 1.0, 10.0]", "[0.1, 0.101]", "values of damping that are tuned differ by 2 %"),
        ("[0.1, 1.0, 10.0]", "[0.0]", "grid.damping: input should be greater than or equal to 0.0001, got 0.0"),
        ("[0.1, 1.0, 10.0]", "[1e7]", "grid.damping: input should be less than or equal to 1000000, got 10000000.0"),
    ],
)
def test_a_wrong_damping_is_told_in_one_line(old: str, new: str, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        grid(DAMPED.replace(old, new))
    assert said in str(caught.value)


def test_blocks_that_share_a_cell_agree_on_its_dampings() -> None:
    block = DAMPED.split("[grid]")[1].split("[tuning]")[0]
    text = DAMPED.replace("[grid]", "[[grid]]").replace("[tuning]", f"[[grid]]{block.replace('[0.1, 1.0, 10.0]', '[0.1, 1.0]')}[tuning]")
    with pytest.raises(BadInputError, match="different damping"):
        grid(text)


def test_blocks_may_share_a_method_without_a_damping_and_differ_in_the_dampings_of_others() -> None:
    block = DAMPED.split("[grid]")[1].split("[tuning]")[0].replace('"batch"', '"foof"').replace("[0.1, 1.0, 10.0]", "[0.3, 3.0]")
    found = grid(DAMPED.replace("[grid]", "[[grid]]").replace("[tuning]", f"[[grid]]{block}[tuning]")).dampings()
    assert {cell.method: dampings for cell, dampings in found.items()} == {"batch": (0.1, 1.0, 10.0), "foof": (0.3, 3.0)}


def test_without_tuning_the_methods_that_have_one_are_run_at_each_damping() -> None:
    found = {(t.method, t.damping) for t in plan(grid(UNTUNED), {}).missing}
    assert found == {("none", None), ("batch", 0.1), ("batch", 1.0), ("batch", 10.0)}


def test_the_rate_is_tuned_for_each_damping_and_the_best_pair_is_tested() -> None:
    records, choices = played(DAMPED, peak(1.0, rate=0.3))
    assert choices["batch"] == Choice(0.3, at_edge=False, damping=1.0, damping_at_edge=False)
    assert choices["none"].damping is None
    found = [(r.trial.role, (r.trial.damping, r.trial.learning_rate, r.trial.seed)) for r in records if r.trial.method == "batch"]
    tuned = {values for role, values in found if role == "tuning"}
    for damping, best in ((0.1, 0.1), (1.0, 0.3), (10.0, 1.0)):
        assert {(damping, best, seed) for seed in (10, 11, 12)} <= tuned
    assert {values for role, values in found if role == "evaluation"} == {(1.0, 0.3, 0), (1.0, 0.3, 1)}


@pytest.mark.parametrize(
    ("best", "chosen", "at_edge"), [(100.0, 100.0, False), (0.01, 0.01, False), (1e6, 1000.0, True), (1e-6, 0.001, True)]
)
def test_dampings_are_extended_beyond_an_end_and_flagged_where_that_does_not_bracket_the_best(
    best: float, chosen: float, at_edge: bool
) -> None:
    _, choices = played(DAMPED, peak(best))
    assert choices["batch"].damping == pytest.approx(chosen)
    assert choices["batch"].damping_at_edge is at_edge


@pytest.mark.parametrize(("dampings", "best", "chosen"), [("[1e-4, 1e-3, 1e-2]", 1e-9, 1e-4), ("[1e4, 1e5, 1e6]", 1e9, 1e6)])
def test_dampings_are_not_extended_beyond_what_float32_can_solve(dampings: str, best: float, chosen: float) -> None:
    _, choices = played(DAMPED.replace("[0.1, 1.0, 10.0]", dampings), peak(best))
    assert (choices["batch"].damping, choices["batch"].damping_at_edge) == (chosen, True)


def test_a_single_damping_is_the_files_own_and_at_no_edge() -> None:
    _, choices = played(DAMPED.replace("[0.1, 1.0, 10.0]", "0.5"), peak(1e6))
    assert (choices["batch"].damping, choices["batch"].damping_at_edge) == (0.5, False)


def test_the_smaller_of_two_equally_good_dampings_is_taken() -> None:
    _, choices = played(DAMPED, lambda t: 0.5 if t.learning_rate == 0.1 else 0.4)
    assert (choices["batch"].damping, choices["batch"].damping_at_edge) == (0.1, False)


def test_another_batch_size_takes_the_damping_with_the_rate() -> None:
    further = """
        [[grid]]
        method = ["none", "batch"]
        width = 8
        depth = 1
        activation = "tanh"
        batch_size = 32
        rate_from_batch_size = 64
        seed = [0, 1]
        epochs = 1
    """
    text = DAMPED.replace("[grid]", "[[grid]]").replace("[tuning]", f"{further}[tuning]")
    records, _ = played(text, peak(1.0, rate=0.3))
    of_batch = [r.trial for r in records if r.trial.method == "batch"]
    assert {(t.learning_rate, t.damping) for t in of_batch if t.batch_size == 32} == {(0.3, 1.0)}
    with pytest.raises(BadInputError, match="damping goes with"):
        grid(text.replace("rate_from_batch_size = 64", "rate_from_batch_size = 64\ndamping = [1.0]"))


def test_what_tuning_takes_lies_within_the_forecast() -> None:
    bounds = forecast(grid(DAMPED))
    counts = []
    for best in (1.0, 100.0, 1e6, 1e-6):
        for rate in (0.1, 1e-6, 1e6):
            records, _ = played(DAMPED, lambda t, d=best, r=rate: peak(d, r)(t) if t.method == "batch" else 0.5 + t.learning_rate)  # type: ignore[misc]
            counts.append(sum(r.trial.role == "tuning" for r in records))
    assert bounds.tuning[0] <= min(counts)
    assert max(counts) <= bounds.tuning[1]
    told = middling(grid(DAMPED))  # the guess of status: no range is extended for it
    records, _ = played(DAMPED, told)
    assert {r.trial.damping for r in records if r.trial.method == "batch"} == {0.1, 1.0, 10.0}


def test_only_trials_at_the_chosen_damping_are_counted() -> None:
    records, _ = played(DAMPED, peak(1.0, rate=0.3))
    one = next(r.trial for r in records if (r.trial.role, r.trial.method) == ("evaluation", "batch"))
    stray = record(one.model_copy(update={"damping": 10.0}), 0.99)
    (setting,) = summarise(grid(DAMPED), [*records, stray]).settings
    row = setting.rows[1]
    assert (row.cell.method, row.choice.damping, row.accuracy.n) == ("batch", 1.0, 2)
    assert row.accuracy.mean < 0.95


def test_without_tuning_the_best_pair_on_validation_is_shown_and_starred_at_the_edges_of_both() -> None:
    records = [record(one, peak(1e6, rate=0.1)(one)) for one in plan(grid(UNTUNED), {}).missing]
    row = summarise(grid(UNTUNED), records).settings[0].rows[1]
    assert (row.choice.damping, row.choice.damping_at_edge, row.choice.at_edge, row.at_edge) == (10.0, True, True, True)
    assert chosen_rate(row) == "0.01*, damping 10*"
    assert row.edge == "learning rate 0.01, damping 10"
    assert [flag.split(" is ")[0] for flag in flags_of(row)] == ["the chosen learning rate", "the chosen damping"]
    inner = replace(row, choice=Choice(0.1, False, 1.0, True))
    assert (chosen_rate(inner), inner.edge) == ("0.1, damping 1*", "damping 1")


def test_a_damping_survives_parquet_and_older_tables_have_none(tmp_path: Path) -> None:
    records = [record(trial(method="foof", damping=0.03)), record(trial())]
    frame = to_frame(records, "tuned", DAMPED)
    frame.write_parquet(tmp_path / "new.parquet")
    assert from_frame(read_parquet(tmp_path / "new.parquet"))[1] == records
    old = frame.filter(polars.col("method") == "none").drop("damping")
    old.write_parquet(tmp_path / "old.parquet")
    assert from_frame(read_parquet(tmp_path / "old.parquet"))[1] == records[1:]
    frame.with_columns(damping=polars.lit(0.5)).write_parquet(tmp_path / "changed.parquet")
    with pytest.raises(BadInputError, match="none has no damping"):
        from_frame(read_parquet(tmp_path / "changed.parquet").filter(polars.col("method") == "none"))


def test_the_page_says_what_the_corrections_are_and_how_the_damping_was_chosen(tmp_path: Path) -> None:
    records, _ = played(DAMPED, peak(1.0, rate=0.3))
    html = write_report(records, DAMPED, tmp_path / "damped").page.read_text()
    assert "0.3, damping 1<" in html
    assert "correct the gradient of the weights alone" in html
    assert "The damping was chosen" in html
    plain = [one for one in records if one.trial.method == "none"]
    other = write_report(plain, DAMPED, tmp_path / "plain").page.read_text()
    assert "correct the gradient of the weights alone" not in other
