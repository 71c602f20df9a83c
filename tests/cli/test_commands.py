# The command line: exit codes, what goes to which stream, what starts without torch.
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from makers import TINY, TUNED

from affine_divergence.cli.main import call
from affine_divergence.lab.store import opened


def test_help_and_version_of_every_command_import_no_torch() -> None:
    code = "import sys; from affine_divergence.cli.main import call; code = call(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    commands = ("run", "resume", "status", "plan", "report", "reproduce", "bench")
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
        (["plan", "grid.toml", "--store", "other"], "the store other holds the study others, not tiny"),
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
        store.put({"study": "others"})
    assert call(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("affdiv: ")
    assert error.count("\n") == 1
    assert said in error
    assert sorted(p.name for p in tmp_path.iterdir() if p.name not in {"s", "report", "empty", "other"}) == ["grid.toml", "unknown.toml"]


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
