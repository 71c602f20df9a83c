# The table of trials holds everything and gives it back.
from __future__ import annotations

import math
from pathlib import Path

import polars
import pytest
from makers import TINY, record, trial

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet, to_frame
from affine_divergence.lab.outcome import Outcome
from affine_divergence.lab.store import Record


def test_records_survive_parquet_whole(tmp_path: Path) -> None:
    failed = Record(trial(seed=8), Outcome(status="failed", reason="why"), record(trial()).provenance)
    records = [record(trial(seed=s)) for s in range(3)] + [record(trial(role="tuning", epochs=None, steps=7)), failed]
    to_frame(records, "tiny", TINY).write_parquet(tmp_path / "t.parquet")
    text, back, claims = from_frame(read_parquet(tmp_path / "t.parquet"))
    assert (text, claims) == (TINY, None)
    # A trial that failed has no curves: empty in the table as in the record.
    assert back == records


def test_nan_and_infinite_losses_are_not_lost_in_parquet(tmp_path: Path) -> None:
    to_frame([record(trial(), final_loss=math.nan, loss_curve=[math.inf, math.nan])], "tiny", TINY).write_parquet(tmp_path / "t.parquet")
    _, (back,), _ = from_frame(read_parquet(tmp_path / "t.parquet"))
    assert str((back.outcome.final_loss, back.outcome.loss_curve)) == "(nan, [inf, nan])"


def test_the_grid_files_fields_are_columns_under_their_own_names() -> None:
    frame = to_frame([record(trial())], "tiny", TINY)
    fixed = {"study", "data", "method", "width", "depth", "activation", "batch_size", "learning_rate", "seed", "epochs", "steps"}
    assert fixed | {"key", "status", "validation_accuracy", "test_accuracy", "final_loss"} <= set(frame.columns)
    assert frame["key"].item() == trial().key


def test_what_is_not_a_table_of_trials_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"cannot read .*none\.parquet"):
        read_parquet(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("PAR1 not really")
    with pytest.raises(BadInputError, match=r"cannot read .*text\.parquet as Parquet"):
        read_parquet(tmp_path / "text.parquet")
    polars.DataFrame({"key": ["a"]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(BadInputError, match="lacks accuracy_curve, activation"):
        read_parquet(tmp_path / "other.parquet")
    two = polars.concat([to_frame([record(trial())], "tiny", TINY), to_frame([record(trial())], "tiny", TINY + "# more")])
    with pytest.raises(BadInputError, match="2 grid files"):
        from_frame(two)
    with pytest.raises(BadInputError, match="no trials"):
        from_frame(two.clear())


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("method", polars.lit("nothing"), "is no trial: method"),
        ("width", polars.lit(0, polars.Int64), "is no trial: width"),
        ("width", polars.lit(9, polars.Int64), "was changed"),
        ("status", polars.lit("fine"), "status is fine"),
        ("grid", polars.lit(None, polars.String), "column grid is empty"),
        ("width", polars.lit("8"), "width is String, not Int64"),
        ("test_accuracy", polars.lit(5.0), "scores or curves"),
        ("accuracy_curve", polars.lit([0.5], polars.List(polars.Float64)), "scores or curves"),
        ("loss_curve", polars.lit(1.0), "loss_curve is Float64, not List"),
    ],
)
def test_a_table_that_was_changed_is_told_so(column: str, value: polars.Expr, said: str, tmp_path: Path) -> None:
    frame = to_frame([record(trial())], "tiny", TINY).with_columns(value.alias(column))
    frame.write_parquet(tmp_path / "t.parquet")
    with pytest.raises(BadInputError, match=said):
        from_frame(read_parquet(tmp_path / "t.parquet"))


def test_the_claims_that_a_study_kept_are_given_back(tmp_path: Path) -> None:
    to_frame([record(trial(seed=s)) for s in range(2)], "tiny", TINY, "version = 1").write_parquet(tmp_path / "t.parquet")
    frame = read_parquet(tmp_path / "t.parquet")
    assert from_frame(frame)[2] == "version = 1"
    other = frame.with_columns(claims=polars.when(polars.col("seed") == 0).then(polars.col("claims")))
    with pytest.raises(BadInputError, match="2 texts of claims"):
        from_frame(other)


def test_a_table_made_before_there_were_claims_and_parts_of_the_images_is_read(tmp_path: Path) -> None:
    records = [record(trial())]
    to_frame(records, "tiny", TINY).drop("claims", "train_images").write_parquet(tmp_path / "old.parquet")
    assert from_frame(read_parquet(tmp_path / "old.parquet")) == (TINY, records, None)


def test_a_trial_that_is_there_twice_is_not_taken_for_two_seeds() -> None:
    frame = to_frame([record(trial())], "tiny", TINY)
    with pytest.raises(BadInputError, match="a trial twice"):
        from_frame(polars.concat([frame, frame]))


@pytest.mark.parametrize(
    "change",
    [
        {"loss_curve": None, "accuracy_curve": None},
        {"test_accuracy": None},
        {"validation_accuracy": None},
        {"status": "failed"},
    ],
)
def test_a_row_whose_scores_do_not_go_with_its_status_or_role_is_refused(change: dict[str, object]) -> None:
    frame = to_frame([record(trial())], "tiny", TINY)
    spoiled = frame.with_columns(polars.lit(value, frame.schema[name]).alias(name) for name, value in change.items())
    with pytest.raises(BadInputError, match="its scores or curves are not those of a trial"):
        from_frame(spoiled)
