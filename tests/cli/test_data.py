# affdiv data: what it lists, prepares and downloads, and what goes to which stream.
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lab.data import archives, sources
from lab.data.site import HTML, Site, serve

from affine_divergence.cli.data import _tenths
from affine_divergence.cli.main import call
from affine_divergence.lab.data import ARCHIVES, NAMES, _cifar


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("arguments", [["--help"], [], ["digits"]])
def test_it_imports_no_torch(arguments: list[str]) -> None:
    code = "import sys; from affine_divergence.cli.main import call; code = call(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "data", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_alone_it_lists_every_name_and_how_each_is_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert all(len(line.split()) > 3 for line in lines)


def test_a_data_set_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["data", "digits"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert [line.split(maxsplit=1) for line in out.splitlines()] == [
        ["name", "digits"],
        ["form", "embedded in scikit-learn"],
        ["images", "1,149 train, 288 validation, 360 test"],
        ["shape", "1 × 8 × 8"],
        ["classes", "10"],
        ["digest", "086e3d0c7b1655d4"],
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cifar"], "did you mean cifar10?"),
        (["digits=here"], "digits is embedded and takes no path"),
        (["cifar10"], "affdiv data cifar10 --download brings it there"),
        (["cifar10=nowhere"], "nowhere: no such folder"),
        (["fashion-mnist=nowhere"], "nowhere: no such folder"),
        (["--download"], "wants the name of a data set: affdiv data cifar10 --download"),
        (["fashion-mnist", "--download"], "fetches cifar10 only; Fashion-MNIST in IDX files: Debian's package dataset-fashion-mnist"),
        (["cifar10=here", "--download"], "to download to a folder write --to FOLDER"),
        (["cifar10", "--to", "here"], "--to is of use with --download only"),
        (["cifar10", "--mirror", "http://host/"], "--mirror is of use with --download only"),
        (["cifar10", "--download", "--mirror", "host"], "--mirror 'host': wanted http://… or https://…"),
        (["cifar10", "--download", "--to", "/dev/null/here"], "cannot use /dev/null/here: Not a directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["data", *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("affdiv: ")
    assert said in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def content(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small archive that is the official one here, at an address where nothing listens."""
    files = archives.batch_files(tmp_path_factory.mktemp("made") / "batches")
    content = archives.pack(files)
    monkeypatch.setitem(ARCHIVES, "cifar10", archives.described(content, files))
    monkeypatch.setattr(_cifar, "EXPECTED", {"train": sources.TRAIN, "test": sources.TEST})
    return content


def test_a_download_is_shown_in_plain_lines_prepared_and_found_from_then_on(
    content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "xdg" / "affine-divergence" / "downloads" / "cifar10" / archives.FOLDER
    with serve(Site(content)) as site:
        assert call(["data", "cifar10", "--download", "--mirror", "http://127.0.0.1:9/", "--mirror", site.url]) == 0
    out, error = capsys.readouterr()
    lines = error.splitlines()
    assert lines[:3] == [
        "trying http://127.0.0.1:9/archive.tar.gz",
        "http://127.0.0.1:9/archive.tar.gz: Connection refused; trying the next address",
        f"trying {site.url}",
    ]
    assert 2 <= len(lines[3:]) <= 11
    assert all(line.startswith("archive.tar.gz: ") and line.endswith(" of 0.2 MB") for line in lines[3:])
    assert "\x1b" not in error
    assert f"form      Python batches, {folder}\n" in out
    assert "54 train, 6 validation, 20 test" in out
    assert call(["data", "cifar10"]) == 0
    assert capsys.readouterr().out == out


def test_another_folder_is_used_and_how_to_name_it_said(content: bytes, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with serve(Site(content)) as site:
        assert call(["data", "cifar10", "--download", "--mirror", site.url, "--to", str(tmp_path / "to")]) == 0
    assert f"use with  --data cifar10={tmp_path / 'to' / archives.FOLDER}\n" in capsys.readouterr().out
    assert not (tmp_path / "xdg" / "affine-divergence" / "downloads").exists()


def test_a_failed_download_is_exit_code_1_and_ends_with_one_line_that_says_the_way_out(
    content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(Site(HTML)) as site:
        assert call(["data", "cifar10", "--download", "--mirror", site.url]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    last = error.splitlines()[-1]
    assert last.startswith("affdiv: archive.tar.gz could not be downloaded (")
    assert "a web page (HTML)" in last
    assert "Connection refused" in last
    assert last.endswith("or write --data cifar10=PATH")


def test_plain_progress_is_eleven_lines_whatever_the_size(capsys: pytest.CaptureFixture[str]) -> None:
    show = _tenths("file")
    for have in range(0, 1_000_001, 1000):
        show(have, 1_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "file: 1.0 of 1.0 MB"


def test_on_a_terminal_there_is_a_bar(content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with serve(Site(content)) as site:
        assert call(["data", "cifar10", "--download", "--mirror", site.url]) == 0
    error = capsys.readouterr().err
    assert "━" in error
    assert f"trying {site.url}\n" in error
