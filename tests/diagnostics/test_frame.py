# The records as a polars DataFrame: its columns, its types, what is missing.
from __future__ import annotations

import dataclasses
import math
import sys

import diagnosis_maker as made
import polars as pl
import pytest

from affine_divergence.diagnostics._frame import to_frame
from affine_divergence.diagnostics._records import Check, Counterfactual, Coverage, Row, Step


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


@pytest.mark.parametrize(
    ("what", "record"), [("rows", Row), ("counterfactual", Counterfactual), ("steps", Step), ("checks", Check), ("coverage", Coverage)]
)
def test_each_kind_of_record_has_its_frame_with_every_field(what: str, record: type) -> None:
    two = [made.diagnosis(step=5), made.diagnosis(step=9)]
    frame = to_frame(two, what)
    assert frame.columns == ["step", *(field.name for field in dataclasses.fields(record))]
    expected = [{"step": one.step} | dataclasses.asdict(found) for one in two for found in getattr(one, what)]
    assert frame.to_dicts() == [{name: None if value != value else value for name, value in line.items()} for line in expected]
    assert two[0].to_frame(what).equals(to_frame(two[:1], what))
    assert to_frame([], what).schema == frame.schema
    assert frame.height > 2


def test_the_samples_have_a_line_for_each_row_that_was_kept() -> None:
    nothing = made.samples("none", count=0, multiplier=(), alignment=(), gradient=())
    kept = made.samples("head", count=60)
    frame = made.diagnosis(samples=(nothing, kept)).to_frame("samples")
    assert frame.select("step", "module", "call", "total").unique().rows() == [(7, "head", 0, 120)]
    assert frame["index"].to_list() == list(kept.index)
    assert frame["multiplier"].to_list() == [None, *kept.multiplier[1:]]
    assert frame["gradient"].to_list() == list(kept.gradient)
    assert frame["axes"].to_list() == [[60, 2]] * 60
    assert made.diagnosis(samples=()).to_frame("samples").schema == frame.schema


def test_a_frame_of_what_there_is_not_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match="wanted one of rows, counterfactual, steps, checks, coverage, samples, got 'loss'"):
        made.diagnosis().to_frame("loss")


def test_there_is_a_frame_for_every_kind_of_records_of_a_diagnosis() -> None:
    for field in dataclasses.fields(made.diagnosis()):
        if isinstance(getattr(made.diagnosis(), field.name), tuple):
            assert made.diagnosis().to_frame(field.name).height
