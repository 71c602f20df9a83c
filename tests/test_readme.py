# README's examples run as written, and their models train.
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES[:2], ids=["linear", "convolution"])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_example_trains_better_than_its_plain_twin_at_the_same_rate(code: str, seed: int) -> None:
    def loss(source: str) -> float:
        names: dict[str, Any] = {}
        exec(source.replace("manual_seed(0)", f"manual_seed({seed})"), names)
        return float(torch.nn.functional.cross_entropy(names["model"](names["x"]), names["target"]).detach())

    plain = re.sub(r', gain="auto"|, form="norm-like"|ad\.init\.hidden_gain_\(model\)', "", code)
    plain = plain.replace("ad.nn.PatchNorm", "torch.nn.").replace("ad.nn.AffineLike", "torch.nn.")
    assert re.findall(r"ad\.\S+?\(", plain) == ["ad.param_groups("]  # of plain layers: one group at the rate given
    untrained = loss(re.sub(r"\brange\(\d+\)", "range(0)", code))
    assert loss(code) < 0.75 * loss(plain) < 0.75 * untrained


def test_the_example_of_the_gradient_alone_learns_what_its_plain_twin_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    code = EXAMPLES[2]

    def loss(source: str) -> float:
        names: dict[str, Any] = {}
        exec(source, names)
        return float(torch.nn.functional.mse_loss(names["model"](names["x"]), names["target"]).detach())

    plain_code = re.sub(r", damping=[\d.]+", "", code).replace("ad.nn.BatchCorrectedLinear", "torch.nn.Linear").split("print")[0]
    plain = [loss(plain_code.replace("lr=20.0", f"lr={rate}")) for rate in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)]
    assert loss(code) < 0.5 * min(one for one in plain if one == one)
    share, said = capsys.readouterr().out.split(" ", 1)
    assert 0.0 < float(share) < 1.0
    assert said.startswith("of the last ideal step")


def test_the_example_of_the_diagnosis_prints_one_of_the_first_step_and_one_while_training(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = EXAMPLES[3:]
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("Diagnosis of")] == ["Diagnosis of step 0", "Diagnosis of step 100"]
    before, after = names["found"], names["monitor"].last
    assert [row.module for row in before.rows] == [row.module for row in after.rows] == ["0", "2"]
    assert before.loss.realised < 0.0
    assert {one.kind for one in before.counterfactual} == {"none", "affine-like", "norm-like", "sample", "batch"}


def test_every_file_that_it_links_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) >= 3
    assert [link for link in links if not (README.parent / link).exists()] == []
