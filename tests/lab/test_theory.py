# The starts of the figure: what each is, that networks follow the theory, and the figure itself.
from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from affine_divergence.lab.theory import STARTS, follow, starts_figure, table
from affine_divergence.nn import AffineLikeLinear

SMALL = {"features": 300, "width": 128, "depth": 4, "networks": 4}


@pytest.mark.parametrize("nonlinearity", ["tanh", "leaky_relu"])
def test_networks_follow_the_theory_of_each_start(nonlinearity: str) -> None:
    for one in follow(nonlinearity, **SMALL):
        for name in ("sqnorm", "gradient", "gram_gap"):
            for place, expected in enumerate(getattr(one.theory, name)):
                logs = [math.log(getattr(curve, name)[place]) for curve in one.networks]
                assert sum(logs) / len(logs) == pytest.approx(math.log(expected), abs=0.35), (one.start, name, place)


def test_the_first_start_is_what_the_layer_draws() -> None:
    drawn = AffineLikeLinear(300, 4000)
    described = STARTS["nn.Linear's weights and biases"](300, 4000, False, "tanh")
    assert drawn.weight.var().item() == pytest.approx(described.variance, rel=0.02)
    assert drawn.bias.var().item() == pytest.approx(described.bias_variance, rel=0.1)
    assert drawn.gain == described.gain


def test_critical_variance_is_that_of_torchs_initialisers() -> None:
    start = STARTS["critical variance 1/(c fan_out)"]
    weight = torch.empty(1000, 1000)
    nn.init.kaiming_normal_(weight, a=0.01, mode="fan_out")
    assert start(1000, 1000, False, "leaky_relu").variance == pytest.approx(weight.var().item(), rel=0.01)
    nn.init.xavier_normal_(weight)
    assert start(1000, 1000, False, "tanh").variance == pytest.approx(weight.var().item(), rel=0.01)


def test_fixed_point_keeps_its_signal_from_the_first_layer_on() -> None:
    (one,) = [one for one in follow("tanh", **SMALL | {"networks": 0}) if one.start.startswith("B")]
    assert one.theory.sqnorm == pytest.approx([1.0] * 4, rel=1e-12)
    assert one.theory.gradient == pytest.approx([1.0] * 4, rel=0.05)


def test_seed_decides_the_networks() -> None:
    first, again, other = (follow("tanh", **SMALL | {"networks": 1}, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0].theory == other[0].theory
    assert first[0].networks != other[0].networks


def test_figure_names_each_start_and_draws_lines_and_dots() -> None:
    found = follow("tanh", **SMALL) + follow("relu", **SMALL)
    picture = starts_figure(found)
    ElementTree.fromstring(picture)
    texts = re.findall(r"<text[^>]*>([^<]*)", picture)
    assert set(STARTS) <= {text.replace("&#x27;", "'") for text in texts}
    assert {"Tanh: 1 − κ", "ReLU: signal ‖x‖²"} <= set(texts)


def test_table_shows_theory_beside_networks() -> None:
    found = follow("tanh", **SMALL)
    lines = list(table(found, (1, 4)))
    assert len(lines) == 1 + 4 * len(STARTS)
    start = lines.index("  B: fixed point, τ = 1")
    assert lines[start + 1].split()[1].startswith("1.00e+00/")
