# The records of diagnoses as one polars DataFrame.
from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._records import Check, Counterfactual, Coverage, Diagnosis, Part, Row, Samples, Step
from affine_divergence.diagnostics._visible import shown

if TYPE_CHECKING:
    import polars

_RECORDS: Mapping[str, type] = {
    "rows": Row,
    "counterfactual": Counterfactual,
    "steps": Step,
    "checks": Check,
    "coverage": Coverage,
    "samples": Samples,
}
_OF_EACH_ROW = ("index", "multiplier", "alignment", "gradient")  # of samples


def to_frame(diagnoses: Sequence[Diagnosis], what: Part = "rows") -> polars.DataFrame:
    """The step, then the fields of a record; NaN becomes null, and what is not printable in a name is escaped.

    The types are the same whatever the records hold, and without any.
    """
    if what not in _RECORDS:
        raise ValueError(f"wanted one of {', '.join(_RECORDS)}, got {what!r}")
    with needed_for("a DataFrame"):
        import polars as pl

    types: dict[Any, Any] = {int: pl.Int64, int | None: pl.Int64, float: pl.Float64, bool: pl.Boolean}  # what is left is text
    types |= {tuple[int, ...]: pl.List(pl.Int64), tuple[float, ...]: pl.List(pl.Float64)}
    schema = {"step": pl.Int64} | {name: types.get(hint, pl.String) for name, hint in typing.get_type_hints(_RECORDS[what]).items()}
    found = pl.DataFrame([{"step": one.step} | vars(record) for one in diagnoses for record in getattr(shown(one), what)], schema=schema)
    if what == "samples":
        found = found.filter(pl.col("index").list.len() > 0).explode(*_OF_EACH_ROW)
    return found.fill_nan(None)
