# The report: what it says, that it stands alone, and that it is made again from its own table.
from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from makers import TINY, TUNED, grid, record

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.report import write_report
from affine_divergence.lab.store import Record
from affine_divergence.lab.tuning import plan


def records(text: str = TINY) -> list[Record]:
    return [record(one, 0.5 + one.learning_rate / 2 + 0.01 * one.seed) for one in plan(grid(text), {}).missing]


def test_the_page_is_made_again_from_its_table_byte_for_byte(tmp_path: Path) -> None:
    page = write_report(records(), TINY, tmp_path / "first").page
    text, back, claims = from_frame(read_parquet(tmp_path / "first" / "trials.parquet"))
    again = write_report(back, text, tmp_path / "second", claims).page
    assert again.read_bytes() == page.read_bytes()
    assert sorted(p.name for p in (tmp_path / "first" / "figures").iterdir()) == [
        f"{kind}-2x8-tanh-b32-e2.svg" for kind in ("accuracy", "learning-curves", "learning-rates")
    ]


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    page = write_report(records(), TINY, tmp_path).page
    text = page.read_text()
    assert re.findall(r"""(?:src|href)=["'](?!data:)|@import|url\(|<script|<link""", text) == []


def test_the_figures_are_well_formed_and_show_every_method(tmp_path: Path) -> None:
    write_report(records(), TINY, tmp_path)
    for figure in (tmp_path / "figures").iterdir():
        ET.fromstring(figure.read_text())
        colours = {"#000000", "#0072b2"}  # none, affine-like
        assert colours <= set(re.findall(r"stroke: (#\w+)", figure.read_text().lower())) | {"#000000"}, figure.name


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    page = write_report(records(), TINY, tmp_path).page
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.read_text()))
    assert "affine-like 0.3* 3 66.00 [63.52, 68.48] 0/3" in text
    assert "Not finished" not in text
    assert "12 done" in text


def test_flags_name_what_diverged_and_what_is_missing(tmp_path: Path) -> None:
    some = records()[:-1]
    at = next(i for i, r in enumerate(some) if r.trial.method == "affine-like" and r.trial.learning_rate == 0.3)
    some[at] = record(some[at].trial, 0.6, status="diverged")
    page = write_report(some, TINY, tmp_path).page
    assert "1 of 2 runs diverged and count as chance" in page.read_text()
    assert "Not finished: 1 trials" in page.read_text()


def test_one_tuning_seed_is_not_told_as_several(tmp_path: Path) -> None:
    for seeds, said in (("[10]", "neighbours with 1 seed."), ("[10, 11]", "neighbours with 2 seeds.")):
        text = TUNED.replace("[10, 11, 12]", seeds)
        done: list[Record] = []
        while missing := plan(grid(text), {one.trial: one.outcome.validation_accuracy or 0.0 for one in done}).missing:
            done += [record(trial, 0.5) for trial in missing]
        assert said in write_report(done, text, tmp_path).page.read_text()


def test_text_of_the_grid_file_is_shown_as_text(tmp_path: Path) -> None:
    evil = TINY + "# <script>alert(1)</script>\n"
    page = write_report(records(), evil, tmp_path).page
    assert "<script>" not in page.read_text()
    assert "&lt;script&gt;" in page.read_text()


def test_nothing_to_report_and_nowhere_to_write_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="nothing to report yet"):
        write_report([], TINY, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot write the report"):
        write_report(records(), TINY, tmp_path / "file")


def test_a_report_takes_the_place_of_the_one_that_was_there_with_its_figures(tmp_path: Path) -> None:
    write_report(records(), TINY, tmp_path)
    (tmp_path / "figures" / "of-another-study.svg").write_text("<svg/>")
    page = write_report(records(), TINY, tmp_path).page
    assert page.exists()
    assert "of-another-study.svg" not in {p.name for p in (tmp_path / "figures").iterdir()}
    (tmp_path / "mine" / "figures").mkdir(parents=True)
    (tmp_path / "mine" / "figures" / "drawing.svg").write_text("<svg/>")
    write_report(records(), TINY, tmp_path / "mine")  # where there was no report nothing is removed
    assert (tmp_path / "mine" / "figures" / "drawing.svg").exists()
