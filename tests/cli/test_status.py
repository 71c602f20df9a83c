# affdiv status and affdiv plan: counts of what is stored and of what a grid file asks for, without training or torch.
from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from makers import TINY, TUNED, grid, record, trial

from affine_divergence.cli.main import call
from affine_divergence.lab.forecast import forecast
from affine_divergence.lab.store import opened
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of TINY's twelve trials two are done, one diverged, one failed, two would be running; and one is of another grid."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    Path("tuned.toml").write_text(TUNED)
    trials = plan(grid(TINY), {}).missing
    with opened(tmp_path / "store") as store:
        store.put({"study": "tiny", "grid": TINY})
        store.add([record(trials[0]), record(trials[1]), record(trials[2], 0.1, status="diverged"), record(trial(seed=77))])
        store.add([record(trials[3], status="failed", validation_accuracy=None, test_accuracy=None, reason="why")])
        store.begin([trials[:4], trials[4:6], trials[6:]])
        store.add([], running=[2])
    return tmp_path / "store"


def test_status_counts_what_is_stored_and_what_runs_only_while_a_run_holds_the_store(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["status", "store", "--json"]) == 0
    counts = {"study": "tiny", "data": "digits", "total": 12, "total_known": True, "done": 2, "diverged": 1, "failed": 1}
    assert json.loads(capsys.readouterr().out) == {**counts, "running": 0, "writer": None}
    with opened(store):
        assert call(["status", "store", "--json"]) == 0
        now = json.loads(capsys.readouterr().out)
        assert now.pop("writer").startswith("process ")
        assert now == {**counts, "running": 2}
        assert call(["status", "store"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {name: rows[name] for name in ("total", "done", "diverged", "failed", "running")} == {
        "total": "12",
        "done": "2",
        "diverged": "1",
        "failed": "1",
        "running": "2",
    }


def test_the_total_of_a_tuned_study_is_a_least_until_tuning_is_over(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(store) as opened_store:
        opened_store.put({"study": "tuned", "grid": TUNED})
    assert call(["status", "store"]) == 0
    assert "total     26 or more: tuning decides" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["status", "store"], ["status", "store", "--json"], ["plan", "tuned.toml", "--store", "tuned"]])
def test_status_and_plan_start_without_torch_polars_and_scipy(arguments: list[str], store: Path) -> None:
    with opened(Path("tuned")) as opened_store:
        opened_store.put({"study": "tuned", "grid": TUNED})
    code = (
        "import sys; from affine_divergence.cli.main import call; code = call(sys.argv[1:]); "
        "print([m for m in ('torch', 'polars', 'scipy', 'sklearn', 'matplotlib') if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_plan_says_what_is_certain_what_is_at_most_and_what_a_store_holds(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "tiny.toml", "--store", "store"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "study       tiny, on digits",
        "cells       2",
        "evaluation  12 trials",
        "total       12 trials",
        "first       12 trials in 1 stack",
        "held        2 done, 1 diverged, 1 failed; 1 that this grid does not ask for",
        "next        9 trials in 3 stacks",  # those of the round that was begun
    ]
    assert call(["plan", "tuned.toml"]) == 0
    out = capsys.readouterr().out
    least, most = forecast(grid(TUNED)).tuning
    assert f"tuning      at least {least} trials, at most {most}\n" in out
    assert "evaluation  4 trials\n" in out


def test_what_tuning_takes_lies_within_the_forecast_and_reaches_its_least() -> None:
    for text in (TUNED, TUNED.replace("[tuning]", "[tuning]\nstride = 1\nextend = 1"), TUNED.replace("[10, 11, 12]", "[10]")):
        checked = grid(text)
        taken = []
        for peak in (None, 1e-4, 0.01, 0.02, 0.03, 0.1, 0.2, 0.3, 0.9, 1.0, 1e4):  # None: no rate is better than another
            told: dict[Trial, float] = {}
            while stage := plan(checked, told).missing:
                told.update((one, -abs(math.log(one.learning_rate / peak)) if peak else 0.0) for one in stage)
            taken.append(sum(one.role == "tuning" for one in told))
        least, most = forecast(checked).tuning
        assert least == min(taken)
        assert most >= max(taken)
