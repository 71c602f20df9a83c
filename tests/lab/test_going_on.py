# A study that goes on: with a grid that grew, with rates written otherwise, on another machine from its table, from an older store.
from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import polars
import pytest
from makers import STUDY, TINY
from running import affdiv, results, stored

from affine_divergence.cli.main import call
from affine_divergence.lab.frame import to_frame
from affine_divergence.lab.store import FILE, opened, read


@pytest.fixture
def store(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(undisturbed, tmp_path / "store"))


def table(store: Path, path: Path) -> polars.DataFrame:
    with read(store) as opened_store:
        frame = to_frame(opened_store.records(), "faults", opened_store.get("grid") or "")
    frame.write_parquet(path)
    return frame


def test_a_finished_grid_extended_by_a_seed_runs_only_that_and_the_same_rates_written_otherwise_run_nothing(store: Path) -> None:
    before = stored(store)
    Path("same.toml").write_text(STUDY.replace("[0.1, 0.3, 1.0]", "[1e-1, 0.30, 1.0]"))
    same = affdiv(store.parent, "run", "same.toml", "--store", "store")
    assert (same.returncode, same.stderr) == (0, "")
    Path("more.toml").write_text(STUDY.replace("[0, 1]", "[0, 1, 2]"))
    more = affdiv(store.parent, "run", "more.toml", "--store", "store", "--workers", "1")
    assert more.returncode == 0, more.stderr
    assert more.stderr.startswith("evaluation: 0 of 6 trials")
    after = stored(store)
    assert {key: after[key] for key in before} == before
    assert {record.trial.seed for key, record in after.items() if key not in before} == {2}


def test_a_study_goes_on_from_its_table_to_the_same_end(store: Path, tmp_path: Path) -> None:
    table(store, tmp_path / "all.parquet").filter(polars.col("role") == "tuning").write_parquet(tmp_path / "tuning.parquet")
    Path("grid.toml").write_text(STUDY)
    done = affdiv(tmp_path, "run", "grid.toml", "--store", "new", "--resume-from", "tuning.parquet", "--workers", "1")
    assert done.returncode == 0, done.stderr
    tuning = sum(record.trial.role == "tuning" for record in stored(store).values())
    first, second = done.stderr.splitlines()[:2]
    assert first == f"{tuning} of the {tuning} trials of tuning.parquet taken over"
    assert second.startswith("evaluation: 0 of 12 trials")
    assert results(Path("new")) == results(store)
    assert {k: r for k, r in stored(Path("new")).items() if r.trial.role == "tuning"} == {
        k: r for k, r in stored(store).items() if r.trial.role == "tuning"
    }


def test_a_table_is_taken_over_only_where_it_is_of_the_same_study_and_images_and_what_is_stored_stays(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("grid.toml").write_text(STUDY)
    frame = table(store, tmp_path / "all.parquet")
    frame.with_columns(study=polars.lit("others")).write_parquet("study.parquet")
    frame.with_columns(data_digest=polars.lit("0" * 16)).write_parquet("images.parquet")
    Path("wider.toml").write_text(STUDY.replace("[4, 5, 6]", "[7]"))
    for grid, file, said in (
        ("grid", "study", "study.parquet holds the study others, this is faults"),
        ("grid", "images", "images.parquet holds trials on images with the digest 0000000000000000, this is "),
        ("wider", "all", "all.parquet holds no finished trial that the grid asks for"),
        ("grid", "grid.toml", "grid.toml"),
    ):
        name = file if "." in file else f"{file}.parquet"
        assert call(["run", f"{grid}.toml", "--store", f"new-{file}", "--resume-from", name]) == 2
        assert said in capsys.readouterr().err
        assert not (Path(f"new-{file}") / FILE).exists() or stored(Path(f"new-{file}")) == {}
    before = stored(store)
    frame.with_columns(validation_accuracy=polars.lit(0.5)).write_parquet("changed.parquet")
    assert call(["run", "grid.toml", "--store", "store", "--resume-from", "changed.parquet"]) == 0
    assert "0 of the " in capsys.readouterr().err
    assert stored(store) == before


def test_a_store_of_the_format_before_the_queue_is_read_and_goes_on(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stored(store)
    connection = sqlite3.connect(store / FILE)
    connection.execute("DROP TABLE queue")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    assert call(["status", "store", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["done"] + status["diverged"], status["running"]) == (len(before), 0)
    assert status["total"] == len(before)
    assert call(["resume", "store"]) == 0
    with opened(store) as now:
        assert now.queue() == []
    assert stored(store) == before


def test_the_path_of_the_data_is_remembered_and_another_one_may_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(tmp_path / "store") as store:
        store.put({"grid": TINY.replace('"digits"', '"cifar10"'), "study": "tiny", "data_path": "/nowhere/images"})
    for data, said in (([], "/nowhere/images"), (["--data", "cifar10=/elsewhere"], "/elsewhere")):
        done = affdiv(tmp_path, "resume", "store", *data)
        assert done.returncode == 2
        assert said in done.stderr
        assert ("this path is from an earlier run: --data cifar10=PATH names another" in done.stderr) == (data == [])
