# affdiv verdicts, export and rule, and the table of claims × protocols on a report's page.
from __future__ import annotations

import re
from pathlib import Path

import pytest
from makers import TINY, grid, record

from affine_divergence.cli.main import call
from affine_divergence.lab.claims import claims_text
from affine_divergence.lab.frame import from_frame, read_parquet, to_frame
from affine_divergence.lab.report import write_report
from affine_divergence.lab.store import Record, opened
from affine_divergence.lab.tuning import plan

GRID = 'claims = ["C7"]\nprotocols = ["sgd-torch-start", "same-start"]\n' + (
    TINY.replace('["none", "affine-like"]', '["norm-like", "affine-like"]')
    .replace("width = [8]\ndepth = [2]", 'width = [16]\ndepth = [3]\nstart = ["torch", "glorot-he"]')
    .replace("[0.03, 0.3]", "0.3")
    .replace('["tanh"]', '["tanh", "leaky-relu"]')
    .replace("[0, 1, 2]", "[0, 1, 2, 3, 4, 5]")
)


def records(text: str = GRID) -> list[Record]:
    """Norm-like is 1 to 1.5 points behind at torch's start and 2 to 2.5 ahead at the other."""
    return [
        record(one, 0.4 + (one.method == "norm-like") * ((0.02 if one.start == "glorot-he" else -0.015) + 0.001 * one.seed))
        for one in plan(grid(text), {}).missing
    ]


def write_table(path: Path, text: str = GRID) -> None:
    to_frame(records(text), "tiny", text, claims_text()).write_parquet(path)


def test_markdown_table_has_a_column_for_each_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "trials.parquet")
    assert call(["verdicts", str(tmp_path / "trials.parquet"), "--markdown"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "| claim | sgd-torch-start | same-start |"
    assert row == (
        "| C7 | **contradicted**<br>ahead in 0 of 2<br>-1.25 [-1.45,\N{NO-BREAK SPACE}-1.05] "
        "| **contradicted**<br>ahead in 2 of 4<br>+0.50 [+0.30,\N{NO-BREAK SPACE}+0.70] |"
    )  # two of four cells are behind, whatever the mean


def test_studies_without_claims_are_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "with.parquet")
    write_table(tmp_path / "without.parquet", GRID.partition("\n")[2].replace("protocols", "# protocols"))
    assert call(["verdicts", str(tmp_path / "with.parquet"), str(tmp_path / "without.parquet")]) == 0
    out, error = capsys.readouterr()
    assert "without.parquet is left out: its grid file names no claims" in error
    assert "norm-like is slightly" in re.sub(r"\s+", " ", out.replace("│", ""))
    assert call(["verdicts", str(tmp_path / "without.parquet")]) == 2
    assert call(["verdicts"]) == 2


def test_page_begins_with_claims_by_protocol(tmp_path: Path) -> None:
    page, summary, judged = write_report(records(), GRID, tmp_path, claims_text())
    text = re.sub(r"\s+", " ", page.read_text())
    assert [one.protocol and one.protocol.name for one in judged] == ["sgd-torch-start", "same-start"]
    assert text.index("<th>sgd-torch-start</th><th>same-start</th>") < text.index("C7, sgd-torch-start") < text.index("All settings")
    assert (tmp_path / "figures" / "claim-C7-same-start.svg").is_file()
    assert len({setting.name for setting in summary.settings}) == len({setting.slug for setting in summary.settings}) == 4


def test_export_writes_a_table_of_a_study_that_has_only_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = records()[:3]
    with opened(tmp_path / "store") as store:
        store.put({"study": "tiny", "grid": GRID, "claims": claims_text()})
        store.add(found)
    assert call(["export", str(tmp_path / "store"), str(tmp_path / "new" / "table.parquet")]) == 0
    assert "3 trials of tiny" in capsys.readouterr().out
    text, back, claims = from_frame(read_parquet(tmp_path / "new" / "table.parquet"))
    assert (text, claims, {one.trial for one in back}) == (GRID, claims_text(), {one.trial for one in found})
    with opened(tmp_path / "none") as store:
        store.put({"study": "tiny", "grid": GRID})
    assert call(["export", str(tmp_path / "none"), str(tmp_path / "table.parquet")]) == 2
    assert "holds no finished trial" in capsys.readouterr().err


def test_rule_prints_a_line_for_each_lead_and_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["rule", "--studies", "2", "--cells", "2", "--rivals", "1", "--seeds", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 5
    assert all(sum(map(float, line.split()[2:])) == pytest.approx(100.0) for line in lines[2:])
    assert call(["rule", "--seeds", "1"]) == 2
    assert "--seeds must be at least 2, got 1" in capsys.readouterr().err
