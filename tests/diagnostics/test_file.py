# Diagnoses in a file: what is written is read back exactly, and what a killed run leaves is dealt with.
from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import diagnosis_maker as made
import pytest

from affine_divergence.diagnostics import load
from affine_divergence.diagnostics._file import append, save


def changed(path: Path, record: str, change: Callable[[dict], object]) -> int:
    """Change the first line of that record; its number."""
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if json.loads(line)["record"] == record)
    value = json.loads(lines[number])
    change(value)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return number + 1


def test_what_is_saved_is_loaded_as_it_was(tmp_path: Path) -> None:
    infinite = {"multiplier_p95": math.inf, "interference": -math.inf}
    odd = made.row('a "quoted"\nname é \x1b[31m\ud800', multiplier_p5=0.1 + 0.2, below_zero=math.nan, rank=None, **infinite)
    several = [made.diagnosis(), made.diagnosis(step=8, rows=(odd,), loss=None), made.diagnosis(step=9, rows=(), coverage=())]
    save(several, tmp_path / "d.jsonl")
    assert load(tmp_path / "d.jsonl") == several  # math.nan is one object there and here, and equal to itself in a tuple
    several[0].save(str(tmp_path / "one.jsonl"))
    assert load(str(tmp_path / "one.jsonl")) == several[:1]


def test_every_line_is_valid_json_with_its_record_and_step(tmp_path: Path) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    save([made.diagnosis(rows=(made.row(interference=math.nan, update_ratio=math.inf),))], tmp_path / "d.jsonl")
    lines = [json.loads(line, parse_constant=no_constant) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert (lines[0]["record"], lines[0]["format"], lines[0]["lines"]) == ("about", 1, len(lines) - 1)
    assert {line["step"] for line in lines} == {7}
    row = next(line for line in lines if line["record"] == "row")
    assert (row["interference"], row["update_ratio"]) == (None, "inf")
    assert {line["record"] for line in lines} == {"about", "coverage", "row", "check", "loss", "counterfactual", "step", "samples"}


def test_appended_one_after_another_is_the_file_that_is_saved_at_once(tmp_path: Path) -> None:
    several = [made.diagnosis(step=step) for step in range(3)]
    save(several, tmp_path / "saved.jsonl")
    for one in several:
        append(one, tmp_path / "appended.jsonl")
    assert (tmp_path / "appended.jsonl").read_bytes() == (tmp_path / "saved.jsonl").read_bytes()


def test_saving_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    save([made.diagnosis(step=1), made.diagnosis(step=2)], tmp_path / "d.jsonl")
    save([made.diagnosis(step=3)], tmp_path / "d.jsonl")
    assert [one.step for one in load(tmp_path / "d.jsonl")] == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save([made.diagnosis(step=1)], tmp_path / "d.jsonl")
    with pytest.raises(TypeError):
        save([made.diagnosis(step=2), made.diagnosis(about={"dtype": object()})], tmp_path / "d.jsonl")
    assert [one.step for one in load(tmp_path / "d.jsonl")] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["d.jsonl"]


def test_wherever_a_killed_run_cut_the_file_the_whole_diagnoses_are_kept_and_more_can_follow(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    small = {"rows": (made.row(),), "coverage": (), "checks": (), "counterfactual": (), "steps": (), "samples": ()}
    ends = []
    for step in range(2):
        append(made.diagnosis(step=step, **small), path)
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for cut in [*range(0, ends[1], 61), ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1]:
        path.write_bytes(whole[:cut])
        # A last line that lacks its line break only is whole.
        kept = [step for step, end in enumerate(ends) if cut >= end - 1]
        assert [one.step for one in load(path)] == kept, cut
        append(made.diagnosis(step=2, **small), path)
        assert [one.step for one in load(path)] == [*kept, 2], cut


def test_a_file_of_before_a_field_was_there_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    append(made.diagnosis(), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (loss,) = (line for line in lines if line["record"] == "loss")
    del loss["repeated"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = load(path)
    assert found.loss is not None
    assert math.isnan(found.loss.repeated)


def test_nothing_is_appended_to_a_file_of_something_else(tmp_path: Path) -> None:
    for text in ("hello", '{"record": "row"}\n', "\n"):
        (tmp_path / "notes").write_text(text)
        with pytest.raises(ValueError, match=r"notes holds no diagnoses, .* name another file"):
            append(made.diagnosis(), tmp_path / "notes")
        assert (tmp_path / "notes").read_text() == text


@pytest.mark.parametrize(
    ("record", "change", "said"),
    [
        ("about", lambda line: line.update(format=2), "wanted format 1, got 2; a newer affine-divergence wrote the file"),
        ("about", lambda line: line.pop("lines"), "the about record lacks lines"),
        ("row", lambda line: line.update(colour="red"), "the row record has the unknown colour"),
        ("row", lambda line: line.pop("rank"), "the row record lacks rank"),
        ("row", lambda line: line.update(rank=1.5), "rank of the row record: wanted a whole number of 64 bits or null, got 1.5"),
        ("row", lambda line: line.update(rows=True), "rows of the row record: wanted a whole number of 64 bits, got true"),
        ("row", lambda line: line.update(update_ratio="many"), 'wanted a number, null, "inf" or "-inf", got "many"'),
        ("row", lambda line: line.update(update_ratio=[1]), r'wanted a number, null, "inf" or "-inf", got \[1\]'),
        ("row", lambda line: line.update(verdict="fine"), 'verdict of the row record: wanted one of ok, look, broken, got "fine"'),
        ("check", lambda line: line.update(ok=1), "ok of the check record: wanted true or false, got 1"),
        ("coverage", lambda line: line.update(module=None), "module of the coverage record: wanted text, got null"),
        ("samples", lambda line: line.update(index=[0.5]), "index of the samples record: wanted a list, each a whole number"),
        ("loss", lambda line: line.update(record="gain"), "wanted a record that is one of about, coverage, row, .*, got 'gain'"),
        ("row", lambda line: line.update(update_ratio=10**400), 'wanted a number, null, "inf" or "-inf", got 1000'),
        ("row", lambda line: line.update(rows=10**400), "rows of the row record: wanted a whole number of 64 bits, got 1000"),
        ("about", lambda line: line.update(step=2**63), "step of the about record: wanted a whole number of 64 bits, got 9223"),
        ("about", lambda line: line.update(lines=-1), "lines of the about record: wanted how many follow, got -1"),
        ("check", lambda line: line.update(record=["check"]), r"wanted a record that is one of about, .*, got \['check'\]"),
        ("step", lambda line: line.update(step=8), "it is none of the lines that the about line before it announces"),
    ],
)
def test_a_line_that_is_no_record_is_an_error_that_says_where_and_what(
    tmp_path: Path, record: str, change: Callable[[dict], object], said: str
) -> None:
    path = tmp_path / "d.jsonl"
    save([made.diagnosis()], path)
    number = changed(path, record, change)
    with pytest.raises(ValueError, match=f"d.jsonl, line {number}: .*{said}"):
        load(path)


def test_a_line_in_the_middle_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    save([made.diagnosis()], tmp_path / "d.jsonl")
    lines = (tmp_path / "d.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "d.jsonl").write_text("".join([*lines[:4], lines[4][:20] + "\n", *lines[5:]]))
    with pytest.raises(ValueError, match=r"line 5: not a JSON object"):
        load(tmp_path / "d.jsonl")


@pytest.mark.parametrize("depth", [900, 985, 100_000])
def test_a_line_that_is_nested_without_end_is_an_error(tmp_path: Path, depth: int) -> None:
    save([made.diagnosis()], tmp_path / "d.jsonl")
    lines = (tmp_path / "d.jsonl").read_text().splitlines(keepends=True)
    for deep in ("[" * depth, '{"record": "row", "step": 7, "module": ' + "[" * depth + "]" * depth + "}"):
        (tmp_path / "d.jsonl").write_text("".join([*lines[:4], deep + "\n", *lines[4:]]))
        with pytest.raises(ValueError, match=r"d.jsonl, line 5: "):
            load(tmp_path / "d.jsonl")
        append(made.diagnosis(), tmp_path / "d.jsonl")


def test_a_line_more_than_announced_is_an_error(tmp_path: Path) -> None:
    save([made.diagnosis()], tmp_path / "d.jsonl")
    lines = (tmp_path / "d.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "d.jsonl").write_text("".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match=rf"line {len(lines) + 1}: it is none of the lines"):
        load(tmp_path / "d.jsonl")


def test_an_empty_file_holds_no_diagnoses_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert load(tmp_path / "empty") == []
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "missing")
