# Every record is whole: its page is made again from its table, its grid file is the one that was run.
from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.report import write_report

ROOT = Path(__file__).parents[1]
RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/trials.parquet"))
CLAIMS = "affine_divergence/lab/claims/claims.toml"


def test_there_is_a_record() -> None:
    assert RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_page_says_what_the_table_says(record: Path, tmp_path: Path) -> None:
    text, records, claims = from_frame(read_parquet(record / "trials.parquet"))
    assert text == (record / "grid.toml").read_text()
    page, summary, _ = write_report(records, text, tmp_path, claims)
    assert summary.missing == 0

    def words(path: Path) -> str:  # the figures' bytes may depend on matplotlib's version
        return re.sub(r"base64,[^\"]*", "", path.read_text())

    assert words(page) == words(record / "report.html")
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(p.name for p in (record / "figures").iterdir())
    assert (record / "README.md").is_file()


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_claims_were_committed_before_the_trials_that_they_judge(record: Path) -> None:
    _, _, claims = from_frame(read_parquet(record / "trials.parquet"))
    if claims is None:
        pytest.skip("the record holds no claims")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no git history here")
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the git history here is cut off")
    versions = git("log", "--format=%H", "--reverse", "--", CLAIMS).split()
    written = [commit for commit in versions if git("show", f"{commit}:{CLAIMS}") == claims]
    assert written, "the claims that the record holds were never committed"
    trials = git("log", "--format=%H", "--reverse", "--", str((record / "trials.parquet").relative_to(ROOT))).split()
    if trials:
        assert trials[0] != written[0], "the claims came with the trials, not before"
        assert written[0] in git("rev-list", trials[0]).split(), "the claims came after the trials"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""
