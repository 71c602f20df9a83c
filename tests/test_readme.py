# README's example runs as written, and its model trains.
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_its_model_learns_faster_than_at_the_plain_rate() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

    def loss(source: str) -> float:
        names: dict[str, Any] = {}
        exec(source, names)
        return float(torch.nn.functional.mse_loss(names["model"](names["x"]), names["target"]).detach())

    untrained, trained = loss(code.replace("range(100)", "range(0)")), loss(code)
    unmatched = loss(code.replace("lr=lr)", "lr=0.01)"))
    assert trained < unmatched < untrained


def test_every_file_that_it_links_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text())
    assert len(links) >= 3
    assert [link for link in links if not (README.parent / link).exists()] == []
