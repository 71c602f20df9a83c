# Every record is whole: its page is made again from its table, its grid file is the one that was run.
from __future__ import annotations

import re
from pathlib import Path

import pytest

from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.report import write_report

RECORDS = sorted(path.parent for path in (Path(__file__).parents[1] / "records").glob("*/trials.parquet"))


def test_there_is_a_record() -> None:
    assert RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_page_says_what_the_table_says(record: Path, tmp_path: Path) -> None:
    text, records = from_frame(read_parquet(record / "trials.parquet"))
    assert text == (record / "grid.toml").read_text()
    page, summary = write_report(records, text, tmp_path)
    assert summary.missing == 0

    def words(path: Path) -> str:  # the figures' bytes may depend on matplotlib's version
        return re.sub(r"base64,[^\"]*", "", path.read_text())

    assert words(page) == words(record / "report.html")
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(p.name for p in (record / "figures").iterdir())
    assert (record / "README.md").is_file()
