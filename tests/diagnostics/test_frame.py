# The rows as a polars DataFrame: its columns, its types, what is missing.
from __future__ import annotations

import dataclasses
import math
import sys

import diagnosis_maker as made
import polars as pl
import pytest

from affine_divergence.diagnostics._frame import to_frame
from affine_divergence.diagnostics._records import Row


def test_the_columns_are_the_step_and_the_fields_of_a_row_in_their_order() -> None:
    assert made.diagnosis().to_frame().columns == ["step", *(field.name for field in dataclasses.fields(Row))]


def test_the_cells_are_the_rows() -> None:
    two = [made.diagnosis(step=5), made.diagnosis(step=9, rows=(made.row("only"),))]
    expected = [{"step": one.step} | dataclasses.asdict(row) for one in two for row in one.rows]
    assert to_frame(two).to_dicts() == expected


def test_nan_is_null_and_an_infinity_is_one() -> None:
    frame = made.diagnosis(rows=(made.row(interference=math.nan, update_ratio=math.inf, rank=None),)).to_frame()
    assert frame["interference"].to_list() == [None]
    assert frame["rank"].to_list() == [None]
    assert frame["update_ratio"].to_list() == [math.inf]


def test_the_types_do_not_hang_on_what_the_rows_hold() -> None:
    numbers = {field.name for field in dataclasses.fields(Row) if field.type == "float"}
    empty = made.row(**dict.fromkeys(numbers, math.nan), rank=None, rank_limit=None)
    expected = to_frame([made.diagnosis()]).schema
    assert to_frame([made.diagnosis(rows=(empty,))]).schema == expected
    assert to_frame([made.diagnosis(rows=())]).schema == expected
    assert to_frame([]).schema == expected
    assert (expected["step"], expected["rank"], expected["verdict"]) == (pl.Int64, pl.Int64, pl.String)
    assert {expected[name] for name in numbers} == {pl.Float64}


def test_names_that_are_not_printable_are_escaped_and_others_as_they_are() -> None:
    frame = made.called("fc\x1b[31m\n\ud800é").to_frame()
    assert frame.select("module", "type", "reason").row(0) == (*[r"fc\x1b[31m\n\ud800é"] * 2, r"of fc\x1b[31m\n\ud800é")


def test_without_polars_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ImportError, match=r"needs polars, .* pip install 'affine-divergence\[diagnosis\]'"):
        made.diagnosis().to_frame()
