# The page of a diagnosis: in one file, in order, escaped, with what there is and nothing that is not.
from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import diagnosis_maker as made
import pytest

from affine_divergence.diagnostics._page import worst_samples, write_page
from affine_divergence.diagnostics._records import Diagnosis
from affine_divergence.diagnostics._sentences import CORRECTIONS, GLOSSARY
from affine_divergence.diagnostics._tables import rows_table

VOID = {"meta", "img", "wbr"}


class Reader(HTMLParser):
    """The words, the tags and their links; fails where a tag is not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)
            self.words.append(" ")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def read(tmp_path: Path, *diagnoses: Diagnosis) -> Reader:
    write_page(diagnoses, tmp_path / "page.html")
    reader = Reader()
    reader.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


def said(reader: Reader) -> str:
    return " ".join("".join(reader.words).split())


def test_the_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    reader = read(tmp_path, made.diagnosis(), made.diagnosis(step=8))
    assert reader.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in reader.links)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import|<script|<link", text)


def test_coverage_comes_first_then_verdicts_figures_corrections_loss_check_and_what_was_assumed(tmp_path: Path) -> None:
    text = said(read(tmp_path, made.diagnosis()))
    parts = (
        "Coverage",
        "Skipped: 13 modules;",
        "1 broken",
        "blocks.0.fc",
        "most rows go uphill",
        "What the columns say",
        "Good is a step",
        "Benign:",
    )
    parts += ("Figures", "under a correction", "affine-like", "loss 2.3026 before", "the weight is used outside the layer")
    parts += ("What was diagnosed", "SGD")
    places = [text.find(part) for part in parts]
    assert -1 not in places
    assert places == sorted(places)


def test_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('1')</script>&amp;"
    row = made.row(evil, verdict="look", reason=evil, type=evil)
    about = {"model": evil, evil: evil}
    coverage = (made.covered(evil, reason=evil, type=evil),)
    check = made.Check(parameter=evil, error=1.0, cosine=0.0, ok=False, reason=evil)
    corrections = (made.counterfactual("none", evil, reason=evil),)
    hostile = made.diagnosis(
        rows=(row,), about=about, coverage=coverage, checks=(check,), counterfactual=corrections, samples=(made.samples(evil),)
    )
    reader = read(tmp_path, hostile, hostile)
    assert reader.tags["script"] == 0
    assert evil in "".join(reader.words)
    pictures = [base64.b64decode(link.partition(",")[2]).decode() for link in reader.links]
    assert len(pictures) == 3
    assert not any("<script" in picture for picture in pictures)


def test_the_last_diagnosis_is_told_and_the_others_stand_in_the_heat_map(tmp_path: Path) -> None:
    first = made.diagnosis(step=3, rows=(made.row("early"),), samples=())
    reader = read(tmp_path, first, made.diagnosis(step=9))
    text = said(reader)
    assert "head, call 0" in text  # the rows of its worst layer
    assert "Step 9, the last of 2 that were diagnosed, from step 3" in text
    assert "early" not in text
    pictures = [base64.b64decode(link.partition(",")[2]).decode() for link in reader.links]
    assert ["early" in picture for picture in pictures] == [False, True, False]
    assert reader.tags["img"] == 3


def test_the_scatter_is_of_the_worst_layer_that_has_samples(tmp_path: Path) -> None:
    assert worst_samples(made.diagnosis()) == made.samples("head")
    assert worst_samples(made.diagnosis(samples=(made.samples("embed"),))) == made.samples("embed")
    assert worst_samples(made.diagnosis(samples=(made.samples("embed", call=1), made.samples("gone")))) is None


def test_a_diagnosis_with_nothing_in_it_is_a_page_without_empty_parts(tmp_path: Path) -> None:
    empty = made.diagnosis(rows=(), coverage=(), checks=(), loss=None, counterfactual=(), steps=(), samples=(), about={})
    reader = read(tmp_path, empty)
    text = said(reader)
    assert "No call of any layer was measured." in text
    assert reader.tags["img"] == 0
    assert not any(part in text for part in ("Figures", "under a correction", "Loss", "Self-check", "What the columns say"))
    assert "under a correction" not in said(read(tmp_path, made.diagnosis(rows=(), counterfactual=(), samples=())))


def test_every_call_is_on_the_page_with_its_verdict(tmp_path: Path) -> None:
    rows = tuple(made.row(f"layer{i}x", verdict=("ok", "look", "broken")[i % 3], reason=f"it is {i}") for i in range(12))
    diagnosis = made.diagnosis(rows=rows, counterfactual=(), samples=())
    text = said(read(tmp_path, diagnosis))
    assert re.findall(r"(layer\d+x) (?:broken|look|ok)", text) == [row.module for row in diagnosis.worst()]
    assert "4 broken 4 look 4 ok" in text


def test_without_a_diagnosis_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one"):
        write_page([], tmp_path / "page.html")


def test_saved_from_the_diagnosis_itself_it_is_the_same_page(tmp_path: Path) -> None:
    one = made.diagnosis(samples=())
    write_page([one], tmp_path / "one.html")
    one.save_html(str(tmp_path / "two.html"))
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_without_jinja_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"a page needs jinja2, .* pip install 'affine-divergence\[diagnosis\]'"):
        made.diagnosis().save_html(tmp_path / "page.html")


def test_a_page_is_made_without_torch(tmp_path: Path) -> None:
    code = "import sys, diagnosis_maker as made; made.diagnosis(samples=()).save_html(sys.argv[1]); print('torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, str(tmp_path / "page.html")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=Path(made.__file__).parent)
    assert done.stdout.strip() == "False"


def test_names_that_are_not_printable_are_on_the_page_escaped(tmp_path: Path) -> None:
    odd, escaped = "fc\x1b[31m\n\u202e\ud800\x85é", r"fc\x1b[31m\n\u202e\ud800\x85é"
    reader = read(tmp_path, made.called(odd), made.called(odd))
    assert "".join(reader.words).count(escaped) > 10
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [letter for letter in page if not (letter.isprintable() or letter == "\n")] == []
    write_page([made.called(escaped)] * 2, tmp_path / "same.html")
    assert (tmp_path / "same.html").read_text(encoding="utf-8") == page


def test_the_page_says_what_each_column_of_its_table_is_and_each_correction(tmp_path: Path) -> None:
    text = said(read(tmp_path, made.diagnosis()))
    columns = {*rows_table(made.diagnosis()).headers} - {"module", "verdict", "type", "p5", "median", "p95"} | {"multiplier"}
    assert {name for name, *_ in GLOSSARY} == columns
    for name, meaning, ideal in GLOSSARY:
        assert f"{name} {meaning} {ideal or '–'}" in text
    assert CORRECTIONS in text


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("Linear", "place along the axes of the layer's input before the last"),
        ("Conv2d", "image, group, then position in the layer's output"),
    ],
)
def test_what_the_index_of_a_row_counts_stands_under_the_scatter_and_over_its_table(kind: str, axes: str, tmp_path: Path) -> None:
    text = said(read(tmp_path, made.diagnosis(rows=(made.row("head", type=kind),))))
    assert f"extreme ones are named by index: {axes}, counted from 0." in text
    assert f"head, call 0; row: {axes}, counted from 0" in text
