# The examples in docs/ print what they say, the diagnoses that they quote are in the records, and every file that the pages link is there.
from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest

from affine_divergence.diagnostics import load
from affine_divergence.lab.theory import follow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
DIAGNOSIS = (DOCS / "diagnosis.md").read_text()
RECORD = ROOT / "records" / "diagnosis"
QUOTES = re.findall(r"```text (\S+)\n(.*?)```", DIAGNOSIS, re.DOTALL)


def test_the_teaching_example_prints_every_number_of_both_losses() -> None:
    results = doctest.testfile(str(DOCS / "corrections.md"), module_relative=False)
    assert results.failed == 0
    assert results.attempted == 5


def test_the_examples_of_the_diagnosis_print_what_they_say() -> None:
    results = doctest.testfile(str(DOCS / "diagnosis.md"), module_relative=False)
    assert results.failed == 0
    assert results.attempted == 15


def test_the_examples_of_initialisation_print_what_the_page_shows() -> None:
    results = doctest.testfile(str(DOCS / "initialisation.md"), module_relative=False)
    assert results.failed == 0
    assert results.attempted == 12


def test_the_table_of_starts_is_the_theorys() -> None:
    size = {"features": 3072, "width": 256, "depth": 16, "networks": 0}
    lines = []
    for tanh, leaky in zip(follow("tanh", **size), follow("leaky_relu", **size), strict=True):
        left, right = tanh.theory, leaky.theory
        numbers = f"{left.sqnorm[-1]:.2g} | {left.gradient[0]:.1e} | {left.gram_gap[-1]:.1e}"
        lines.append(f"| {tanh.start} | {numbers} | {right.gradient[0]:.1e} | {right.gram_gap[-1]:.1e} |")
    assert "\n".join(lines) in (DOCS / "initialisation.md").read_text()


def test_each_record_of_one_step_or_training_is_quoted() -> None:
    assert {name for name, _ in QUOTES} == {path.stem for path in RECORD.glob("*.jsonl")}


@pytest.mark.parametrize(("name", "lines"), QUOTES, ids=[f"{place}-{name}" for place, (name, _) in enumerate(QUOTES)])
def test_every_line_that_is_quoted_of_a_diagnosis_is_in_its_record(name: str, lines: str) -> None:
    printed = str(load(RECORD / f"{name}.jsonl")[-1]).splitlines()
    assert [line for line in lines.splitlines() if line not in printed] == []


def test_the_tables_of_architectures_are_those_of_their_records(tables: ModuleType) -> None:
    folder = RECORD / "architectures"
    assert len(list(folder.glob("*.jsonl"))) == len(tables.ARCHITECTURES) * len(tables.RATES)
    for lines in (tables.table(folder), tables.corrections(folder)):
        assert "\n".join(lines) in DIAGNOSIS


def test_what_is_said_of_the_training_is_in_its_record() -> None:
    first, *_, last = load(RECORD / "training.jsonl")
    (rows,) = last.samples
    all_, uphill = (sum(g * g for g, m in zip(rows.gradient, rows.multiplier, strict=True) if m < limit) for limit in (float("inf"), 0.0))
    (begun,) = [row for row in first.rows if row.module == rows.module]
    (ended,) = [row for row in last.rows if row.module == rows.module]
    words = " ".join(DIAGNOSIS.split())
    assert f"in layer {rows.module} the {ended.below_zero:.0%} uphill hold {uphill / all_:.0%}".replace("%", " %") in words
    assert f"({begun.efficiency:.2f} then, {ended.efficiency:.2f} now)".replace("-", "−") in words
    assert f"from {begun.alignment_median:.2f} to {ended.alignment_median:.2f}" in words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import diagnose_architectures

    return diagnose_architectures
