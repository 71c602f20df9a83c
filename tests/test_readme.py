# README's examples run as written, and their models train.
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=["linear", "convolution"])
def test_an_example_runs_and_its_model_learns_faster_than_at_the_plain_rate(code: str) -> None:
    function = getattr(torch.nn.functional, re.findall(r"functional\.(\w+)", code)[0])

    def loss(source: str) -> float:
        names: dict[str, Any] = {}
        exec(source, names)
        return float(function(names["model"](names["x"]), names["target"]).detach())

    untrained, trained = loss(re.sub(r"\brange\(\d+\)", "range(0)", code)), loss(code)
    (plain,) = re.findall(r"matching_lr\(model, x, lr=([\d.]+)\)", code)
    unmatched = loss(code.replace("lr=lr)", f"lr={plain})"))
    assert trained < unmatched < untrained


def test_every_file_that_it_links_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) >= 3
    assert [link for link in links if not (README.parent / link).exists()] == []
