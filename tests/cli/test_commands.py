# The command line: exit codes, what goes to which stream, what starts without torch.
from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import diagnosis_maker as made
import pytest
from makers import TINY, TUNED

from affine_divergence.cli.main import call, main
from affine_divergence.lab.store import opened


def test_help_and_version_of_every_command_import_no_torch() -> None:
    code = "import sys; from affine_divergence.cli.main import call; code = call(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    commands = ("run", "resume", "status", "plan", "report", "reproduce", "bench", "theory", "verdicts", "export", "rule")
    for arguments in (["--help"], ["--version"], *([command, "--help"] for command in commands)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "missing.toml", "--store", "s"], "missing.toml: No such file"),
        (["run", "grid.toml"], "store"),
        (["run", "grid.toml", "--store", "s", "--worker", "2"], "--worker"),
        (["run", "grid.toml", "--store", "s", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["run", "grid.toml", "--store", "s", "--workers", "two"], "two"),
        (["run", "grid.toml", "--store", "s", "--data", "cifar10"], "asks for the data digits, --data names cifar10"),
        (["run", "grid.toml", "--store", "s", "--data", "digits=here"], "digits"),
        (["run", "unknown.toml", "--store", "s"], "mnist"),
        (["run", "grid.toml", "--store", "grid.toml/s"], "cannot write to the store"),
        (["report", "nowhere"], "there is no nowhere"),
        (["report", "."], "holds no store"),
        (["report", "grid.toml"], "as Parquet"),
        (["reproduce", "slow"], "there is no embedded study slow; there are: quick"),
        (["bench", "layers", "--repeats", "1"], "--repeats must be at least 3"),
        (["bench", "nothing"], "nothing"),
        (["run", "grid.toml", "--store", "s", "--device", "abacus"], "--device abacus is no device"),
        (["run", "grid.toml", "--store", "s", "--device", "cuda:99"], "--device cuda:99 is not there; write cpu"),
        (["run", "grid.toml", "--store", "s", "--resume-from", "grid.toml"], "as Parquet"),
        (["resume", "."], "holds no store"),
        (["resume", "nowhere"], "holds no store"),
        (["resume", "empty"], "the store empty is empty; run a study into it first"),
        (["status", "empty"], "the store empty is empty; run a study into it first"),
        (["status", "nowhere"], "holds no store"),
        (["plan", "missing.toml"], "missing.toml: No such file"),
        (["plan", "grid.toml", "--store", "nowhere"], "holds no store"),
        (["plan", "grid.toml", "--store", "other"], "the store other has the study others, not tiny"),
        (["plan", "grid.toml", "--store", "images"], "the store images has the data cifar10, not digits"),
        (["plan", "claims.toml"], "names the claims C99, the known ones are C1, C2"),
        (["run", "claims.toml", "--store", "new"], "names the claims C99, the known ones are C1, C2"),
        (["run", "many.toml", "--store", "new"], "train_images = 1150 in the grid file; the training part of digits has 1149"),
        (["run", "grid.toml", "--store", "new", "--data", "digits=nowhere"], "digits is embedded and takes no path"),
        (["rum"], "rum"),
    ],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(TINY)
    Path("unknown.toml").write_text(TINY.replace('"digits"', '"mnist"'))
    with opened(Path("empty")):
        pass
    with opened(Path("other")) as store:
        store.put({"study": "others", "grid": TINY.replace('"tiny"', '"others"')})
    with opened(Path("images")) as store:
        store.put({"study": "tiny", "grid": TINY.replace('"digits"', '"cifar10"')})
    Path("claims.toml").write_text('claims = ["C1", "C99"]\n' + TINY)
    Path("many.toml").write_text("train_images = 1150\n" + TINY)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert call(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("affdiv: ")
    assert error.count("\n") == 1
    assert said in error
    assert sorted(p.name for p in tmp_path.iterdir() if p.name not in {"s", "report"}) == files


def test_a_study_runs_from_its_grid_file_to_its_report_with_plain_lines_of_progress(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(TUNED)
    affdiv = [sys.executable, "-c", "from affine_divergence.cli.main import main; main()"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*affdiv, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("run", "grid.toml", "--store", "store", "--workers", "1", "--data", "digits")
    assert done.returncode == 0, done.stderr
    assert "tuning: 0 of 6 trials" in done.stderr
    assert "evaluation: 4 of 4 trials" in done.stderr
    assert "\x1b" not in done.stderr
    done = run("report", "store", "--out", "page")
    assert done.returncode == 0, done.stderr
    assert "affine-like" in done.stdout
    assert "report: page/report.html" in done.stdout
    again = run("report", "page/trials.parquet", "--out", "again")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "report.html").read_bytes() == (tmp_path / "page" / "report.html").read_bytes()


AFFDIV = [sys.executable, "-c", "from affine_divergence.cli import command; command()"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_goes_on_where_nobody_can_read_its_progress(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(TINY)
    with open("/dev/full", "w") as full:
        done = subprocess.run([*AFFDIV, "run", "grid.toml", "--store", "s", "--workers", "1"], cwd=tmp_path, stderr=full, check=False)
    assert done.returncode == 0
    closed = subprocess.run(f"{shlex.join([*AFFDIV, 'status', 's'])} 2>&-", shell=True, cwd=tmp_path, capture_output=True, check=False)
    assert (closed.returncode, b"total     12" in closed.stdout) == (0, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line_and_a_reader_that_left_is_none(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*AFFDIV, "data"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "affdiv: the output cannot be written: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*AFFDIV, "data"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interruption_while_the_commands_are_imported_is_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.meta_path.insert(0, type('Finder', (), {'find_spec': staticmethod(stop)}))"
    stop = "def stop(name, *_):\n    if name == 'cyclopts': raise KeyboardInterrupt\n"
    end = "from affine_divergence.cli import command; command()"
    done = subprocess.run([sys.executable, "-c", f"{stop}{code}\n{end}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "affdiv: interrupted before anything was begun\n")


GOES_ON = "what was finished is stored, the same command goes on from there"
ANEW = "the same command starts anew"


@pytest.mark.parametrize(
    ("arguments", "where", "said"),
    [
        (["diagnose", "--example", "mlp"], "affine_divergence.diagnostics._diagnose.take_step", ANEW),
        (["bench", "layers"], "affine_divergence.lab.benchmarks.layers", ANEW),
        (["data", "digits"], "affine_divergence.lab.data.load", ANEW),
        (["data", "cifar10", "--download"], "affine_divergence.lab.data.download", GOES_ON),
        (["reproduce", "quick", "--out", "out"], "affine_divergence.lab.study.run", GOES_ON),
        (["run", "grid.toml", "--store", "s", "--workers", "1"], "affine_divergence.lab.study.run", ANEW),
    ],
)
def test_an_interruption_says_what_the_same_command_does(
    arguments: list[str], where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text(TINY)
    monkeypatch.setattr(where, interrupted)
    assert call(arguments) == 130
    assert capsys.readouterr().err == f"affdiv: interrupted; {said}\n"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("arguments", [["data"], ["diagnose", "--from", "d.jsonl"]])
def test_letters_that_the_output_has_not_are_question_marks(
    encoding: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(code: str) -> bytes:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, code))
        with pytest.raises(SystemExit, match=r"^0$"):
            main(arguments)
        sys.stdout.flush()
        return written.getvalue()

    monkeypatch.chdir(tmp_path)
    made.called("fc_−\ud800").save("d.jsonl")
    assert printed(encoding) == printed("utf-8").decode().encode(encoding, errors="replace")


def test_closed_output_is_no_error() -> None:
    for arguments in (["data"], ["--help"]):
        done = subprocess.run(f"{shlex.join([*AFFDIV, *arguments])} >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), arguments
