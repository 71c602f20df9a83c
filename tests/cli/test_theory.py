# affdiv theory: the figure in its folder, the numbers on stdout, and bad options.
from __future__ import annotations

from pathlib import Path

import pytest

from affine_divergence.cli.main import call

SMALL = ["--features", "40", "--width", "20", "--depth", "3", "--networks", "2"]


def test_theory_writes_the_figure_and_prints_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert call(["theory", "--out", str(out), *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "tanh: theory/networks after 1, 2, 3 hidden layers" in printed
    assert "leaky_relu" in printed
    assert printed.endswith(f"figure: {out / 'starts.svg'}\n")
    first = (out / "starts.svg").read_bytes()
    assert call(["theory", "--out", str(out), *SMALL]) == 0
    assert (out / "starts.svg").read_bytes() == first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--depth", "1"], "--depth must be at least 2, got 1"),
        (["--networks", "0"], "--networks must be at least 1, got 0"),
        (["--out", "file/inside"], "cannot write to file/inside"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert call(["theory", "--width", "20", *options]) == 2
    assert said in capsys.readouterr().err
