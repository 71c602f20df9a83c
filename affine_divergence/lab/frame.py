# All trials as one table, and back: what trials.parquet holds.
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from affine_divergence.lab.errors import BadInputError, first_line
from affine_divergence.lab.outcome import Outcome, Status
from affine_divergence.lab.store import Record
from affine_divergence.lab.trial import LATER_FIELDS, Trial

if TYPE_CHECKING:
    import polars

PROVENANCE = ("source_digest", "data_digest", "device", "processor", "threads", "python", "torch")
# Columns that older tables lack; null there, or the value that older trials have.
LATER = (*LATER_FIELDS, "stopped_epoch", "timing", "claims")


def to_frame(records: Sequence[Record], study: str, grid_text: str, claims_text: str | None = None) -> polars.DataFrame:
    """A row a trial: its fields, key, status and scores, curves, provenance, and the texts of the grid file and of the claims."""
    import polars

    rows = [
        {
            "study": study,
            **_fields(record.trial),
            "key": record.trial.key,
            **asdict(record.outcome),
            **{name: record.provenance.get(name) for name in (*PROVENANCE, "timing")},
            "grid": grid_text,
            "claims": claims_text,
        }
        for record in records
    ]
    return polars.DataFrame(rows, schema=_schema())


def from_frame(frame: polars.DataFrame) -> tuple[str, list[Record], str | None]:
    """The grid file's text, the records and the claims' text of a table made by `to_frame`; no claims where the study kept none."""
    texts = frame["grid"].unique().to_list()
    if not texts:
        raise BadInputError("the table holds no trials")
    if len(texts) > 1:
        raise BadInputError(f"the table holds the trials of {len(texts)} grid files; a report is about one")
    if texts[0] is None:
        raise BadInputError("the table's column grid is empty; it holds the text of the study's grid file")
    if frame["key"].is_duplicated().any():
        raise BadInputError("the table holds a trial twice, which would count as two seeds; keep one row a key")
    claims = frame["claims"].unique().to_list()
    if len(claims) > 1:
        raise BadInputError(f"the table holds {len(claims)} texts of claims; a study is judged by the one that was current when it began")
    return texts[0], [_record(row) for row in frame.iter_rows(named=True)], claims[0]


def read_parquet(path: Path) -> polars.DataFrame:
    import polars

    try:
        frame = polars.read_parquet(path)
    except (OSError, polars.exceptions.PolarsError) as error:
        raise BadInputError(f"cannot read {path} as Parquet: {first_line(error)}") from error
    schema = _schema()
    later = {name: schema[name] for name in LATER if name not in frame.columns}
    frame = frame.with_columns(polars.lit(LATER_FIELDS.get(name), dtype).alias(name) for name, dtype in later.items())
    missing = sorted(set(schema) - set(frame.columns))
    if missing:
        raise BadInputError(f"{path} is not a table of trials: it lacks {', '.join(missing)}")
    wrong = [f"{name} is {frame.schema[name]}, not {dtype}" for name, dtype in schema.items() if frame.schema[name] != dtype]
    if wrong:
        raise BadInputError(f"{path} is not a table of trials: {'; '.join(wrong)}")
    return frame


def _fields(trial: Trial) -> dict[str, Any]:
    # A gain is a number or a word: one column of text. A stop rule is JSON, as [{"after":0.2,"behind":10.0}].
    values = trial.model_dump()
    stop = None if trial.stop is None else json.dumps(values["stop"], separators=(",", ":"))
    return values | {"gain": None if trial.gain is None else str(trial.gain), "stop": stop}


def _gain(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _stop(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text


def _record(row: dict[str, Any]) -> Record:
    try:
        trial = Trial(**{name: row[name] for name in Trial.model_fields} | {"gain": _gain(row["gain"]), "stop": _stop(row["stop"])})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise BadInputError(f"the table's row with the key {row['key']} is no trial: {wrong}") from error
    if row["key"] != trial.key or row["status"] not in get_args(Status):
        raise BadInputError(
            f"the table's row with the key {row['key']} was changed: its trial has the key {trial.key}, its status is {row['status']}"
        )
    outcome = Outcome(**{field.name: row[field.name] for field in fields(Outcome)})
    scores = [outcome.validation_accuracy, outcome.test_accuracy, *(outcome.accuracy_curve or ())]
    wanted = outcome.status != "failed", outcome.status != "failed" and trial.role == "evaluation"  # whether there are scores
    if (
        outcome.loss_curve is None
        or outcome.accuracy_curve is None
        or len(outcome.loss_curve) != len(outcome.accuracy_curve)
        or wanted != (outcome.validation_accuracy is not None, outcome.test_accuracy is not None)
        or any(score is not None and not 0.0 <= score <= 1.0 for score in scores)
    ):
        raise BadInputError(f"the table's row with the key {row['key']} was changed: its scores or curves are not those of a trial")
    timing = {} if row["timing"] is None else {"timing": row["timing"]}
    return Record(trial, outcome, {name: row[name] for name in PROVENANCE} | timing)


def _schema() -> dict[str, Any]:
    import polars as pl

    return {
        "study": pl.String,
        "data": pl.String,
        "method": pl.String,
        "width": pl.Int64,
        "depth": pl.Int64,
        "activation": pl.String,
        "batch_size": pl.Int64,
        "learning_rate": pl.Float64,
        "damping": pl.Float64,
        "seed": pl.Int64,
        "epochs": pl.Int64,
        "steps": pl.Int64,
        "train_images": pl.Int64,
        "pattern": pl.String,
        "start": pl.String,
        "gain": pl.String,
        "signal": pl.Float64,
        "optimizer": pl.String,
        "weight_decay": pl.Float64,
        "schedule": pl.String,
        "standardise": pl.String,
        "drop_last": pl.Boolean,
        "stop": pl.String,
        "role": pl.String,
        "key": pl.String,
        "status": pl.String,
        "validation_accuracy": pl.Float64,
        "test_accuracy": pl.Float64,
        "final_loss": pl.Float64,
        "loss_curve": pl.List(pl.Float64),
        "accuracy_curve": pl.List(pl.Float64),
        "wall_seconds": pl.Float64,
        "cpu_seconds": pl.Float64,
        "stack_size": pl.Int64,
        "reason": pl.String,
        "stopped_epoch": pl.Int64,
        **{name: pl.Int64 if name == "threads" else pl.String for name in PROVENANCE},
        "timing": pl.String,
        "grid": pl.String,
        "claims": pl.String,
    }
