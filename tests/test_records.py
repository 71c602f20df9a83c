# Every record is whole: its page is made again from its table, its grid file is the one that was run; a diagnosis repeats what was found.
from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from affine_divergence.cli.main import app
from affine_divergence.diagnostics import Diagnosis, _page, load
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.report import _figures, _forest, _overview, write_report

ROOT = Path(__file__).parents[1]
RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/trials.parquet"))
CLAIMS = "affine_divergence/lab/claims/claims.toml"


def test_there_is_a_record() -> None:
    assert RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_page_says_what_the_table_says(record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawing takes minutes, and the figures' bytes may depend on matplotlib's version.
    monkeypatch.setattr(_forest, "svg", lambda figure: plt.close(figure) or "drawn")
    for name in ("accuracy_figure", "learning_rate_figure", "learning_curves_figure"):
        monkeypatch.setattr(_figures, name, lambda _: "drawn")
    monkeypatch.setattr(_overview, "sweep_figure", lambda _: "drawn")
    text, records, claims = from_frame(read_parquet(record / "trials.parquet"))
    assert text == (record / "grid.toml").read_text()
    page, summary, _ = write_report(records, text, tmp_path, claims)
    assert summary.missing == 0

    def words(path: Path) -> str:
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


DIAGNOSES = ROOT / "records" / "diagnosis"
COMMANDS = dict(re.findall(r"`(\S+\.jsonl)` \| `affdiv (diagnose --example .*?) --out", (DIAGNOSES / "README.md").read_text()))


def test_the_page_of_the_training_says_what_its_file_says(tmp_path: Path) -> None:
    _page.write_page(load(DIAGNOSES / "training.jsonl"), tmp_path / "diagnosis.html")

    def words(path: Path) -> str:
        return re.sub(r"base64,[^\"]*|<svg.*?</svg>", "", path.read_text(), flags=re.DOTALL)

    assert words(tmp_path / "diagnosis.html") == words(DIAGNOSES / "diagnosis.html")


def test_each_diagnosed_example_has_its_command() -> None:
    assert {*COMMANDS, "training.jsonl"} == {path.name for path in DIAGNOSES.glob("*.jsonl")}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recorded_command_finds_what_is_recorded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "write_page", lambda *_: None)  # figures take seconds
    app([*shlex.split(COMMANDS[name]), "--out", str(tmp_path)], result_action="return_value")
    assert_alike(load(tmp_path / "diagnosis.jsonl"), load(DIAGNOSES / name))


def test_the_training_goes_as_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import monitor

    accuracy = monitor.train(str(tmp_path / "training.jsonl"))
    assert f"{accuracy:.1%}".replace("%", " %") in (ROOT / "docs" / "diagnosis.md").read_text()
    # Later steps add up the rounding of all before them, and that is the machine's.
    assert_alike(load(tmp_path / "training.jsonl")[:3], load(DIAGNOSES / "training.jsonl")[:3])


def assert_alike(found: list[Diagnosis], recorded: list[Diagnosis]) -> None:
    assert len(found) == len(recorded)
    for one, other in zip(found, recorded, strict=True):
        assert (one.step, one.coverage) == (other.step, other.coverage)
        assert [(check.parameter, check.ok) for check in one.checks] == [(check.parameter, check.ok) for check in other.checks]
        for what in ("rows", "counterfactual", "steps"):
            assert len(getattr(one, what)) == len(getattr(other, what))
            for line, line_recorded in zip(getattr(one, what), getattr(other, what), strict=True):
                assert differing(line, line_recorded) == {}
        if other.loss is not None:
            assert differing(one.loss, other.loss) == {}


def differing(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    pairs = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(other)}
    # On another machine a row or two whose alignment is 0 but for rounding may be on the other side of it.
    tolerances = {"below_zero": 2 / other.rows} if hasattr(other, "rows") else {}
    differ = {name: pair for name, pair in pairs.items() if not alike(*pair, tolerances.get(name, 1e-5))}
    return {name: pair for name, pair in differ.items() if name != "reason"}  # it holds rounded numbers


def alike(value: Any, recorded: Any, tolerance: float) -> bool:
    if not isinstance(recorded, float):
        return bool(value == recorded)  # ranks and verdicts among them
    return (math.isnan(value) and math.isnan(recorded)) or math.isclose(value, recorded, rel_tol=1e-3, abs_tol=tolerance)
