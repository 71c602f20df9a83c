# affdiv bench diagnosis: what it times, how it holds that against its limits, and the memory it counts.
from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from affine_divergence.cli.main import call
from affine_divergence.lab.benchmarks import _diagnosis as bench


def _tiny() -> bench.Net:
    torch.manual_seed(0)
    x, labels = torch.randn(64, 6), torch.arange(64) % 3
    return bench.Net("tiny", lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), x, labels, 5.0)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert call(["bench", "diagnosis", "--repeats", "3"]) == 0
    return capsys.readouterr().out.splitlines()


SECONDS = {
    bench.PLAIN: 0.1,
    bench.CHANGE: 0.15,
    bench.COLUMN: 0.25,
    bench.SPARSE: 0.104,
    bench.DIAGNOSE: 0.31,
    bench.RANK: 0.5,
    bench.COUNTERFACTUAL: 0.7,
    bench.SAMPLES: 0.2,
}


def test_each_time_is_in_ratio_to_a_plain_step_and_held_against_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "nets", lambda: (_tiny(),))
    monkeypatch.setattr(bench, "interleaved", lambda pieces, repeats: {name: SECONDS[name] for name in pieces})
    lines = _lines(capsys)

    def of(name: str) -> str:
        return next(line for line in lines if line.startswith(f"{name:<46}"))

    assert of(bench.PLAIN).split()[-2:] == ["100.0", "1.000"]
    assert of(bench.CHANGE).endswith("150.0    1.500  at most 1.6: holds")
    assert of(bench.SPARSE).endswith("105.5    1.055  at most 1.05: exceeded")  # (99 · 0.104 + 0.25)/100
    assert of(bench.DIAGNOSE).endswith("310.0    3.100  at most 3: exceeded")
    assert of(bench.COLUMN).endswith("2.500")
    said = [line for line in lines if line.startswith(f"{bench.SAMPLES} /")]
    assert said[0].endswith("adds: 4.0  at least 5: missed")  # 0.2/(0.15 − 0.1)
    assert said[1].endswith("1.33")


def test_each_piece_is_a_step_with_what_its_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}

    def once(pieces: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        for piece in pieces.values():
            piece()
        return dict.fromkeys(pieces, 1.0)

    monkeypatch.setattr(bench, "interleaved", once)
    logged = []
    plain_log = bench.Monitor._log
    monkeypatch.setattr(bench.Monitor, "_log", lambda self, before: (logged.append(self.every), plain_log(self, before))[1])
    list(bench._table(_tiny(), 3))
    for every in logged:
        found[str(every)] = found.get(str(every), 0) + 1
    assert found == {"1": 4, str(10**9): 1}  # two that log their first step and this one, one that logs its first alone


def test_the_gradients_of_every_sample_are_made_in_parts_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    net, sizes = _tiny(), []
    plain_vmap = torch.func.vmap

    def watched(*args: object, **kwargs: object) -> Callable[..., object]:
        run = plain_vmap(*args, **kwargs)
        return lambda *given: (sizes.append(len(given[1])), run(*given))[1]

    monkeypatch.setattr(torch.func, "vmap", watched)
    bench._samples(net)()
    assert sizes == [bench.CHUNK, bench.CHUNK]


def test_the_memory_captured_is_that_of_inputs_and_outputs() -> None:
    assert bench._captured(_tiny()) == 4 * 64 * (6 + 8 + 8 + 3)


def test_the_memory_above_a_plain_step_is_told_beside_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([2**20, 2**20 + 3200, 2**20 + 32000, 2**20 + 64000])
    monkeypatch.setattr(bench, "_peak", lambda piece: next(peaks))
    said = [re.search(r"([\d.]+) of the .* captured(?:  at most 2: (\w+))?$", line) for line in bench._memory(_tiny())]
    assert [match and match.groups() for match in said] == [("0.50", "holds"), ("5.00", "exceeded"), ("10.00", None)]


def test_the_peak_of_a_step_holds_what_is_alive_at_once_and_not_more() -> None:
    model, sizes = torch.nn.Linear(2, 2), []

    def run() -> None:
        torch.zeros(1000)
        kept = torch.zeros(2000)
        torch.zeros(500)
        sizes.append(kept.nbytes)

    assert bench._peak(bench._Piece(model, run)) == 4 * 2500
    assert len(sizes) == 2
