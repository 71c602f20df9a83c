# The rows of diagnoses as one polars DataFrame.
from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._records import Diagnosis, Row
from affine_divergence.diagnostics._visible import shown

if TYPE_CHECKING:
    import polars


def to_frame(diagnoses: Sequence[Diagnosis]) -> polars.DataFrame:
    """The step, then the fields of a row; NaN becomes null, and what is not printable in a name is escaped.

    The types are the same whatever the rows hold, and without any.
    """
    with needed_for("a DataFrame"):
        import polars as pl

    types: dict[Any, Any] = {int: pl.Int64, int | None: pl.Int64, float: pl.Float64}  # what is left is text
    schema = {"step": pl.Int64} | {name: types.get(hint, pl.String) for name, hint in typing.get_type_hints(Row).items()}
    rows = [{"step": one.step} | vars(row) for one in diagnoses for row in shown(one).rows]
    return pl.DataFrame(rows, schema=schema).fill_nan(None)
