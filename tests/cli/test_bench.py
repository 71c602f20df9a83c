# The measurements: that they measure what they say.
from __future__ import annotations

import pytest
import torch
from torch import nn

from affine_divergence.lab.benchmarks import _layers as module, layers
from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.nn import AffineLikeLinear


def test_pieces_take_turns_and_the_warming_up_is_not_counted() -> None:
    calls: list[str] = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 5
    assert set(times) == {"a", "b"}


def test_saved_bytes_are_zero_for_the_corrected_layer_and_the_normalised_rows_for_a_norm_before_a_linear() -> None:
    x = torch.randn(10, 6, requires_grad=True)
    assert module.saved_bytes(AffineLikeLinear(6, 4), x) == 0
    assert module.saved_bytes(nn.Sequential(nn.RMSNorm(6, elementwise_affine=False), nn.Linear(6, 4)), x) >= 10 * 6 * 4


def test_the_table_names_every_shape_and_what_the_ratios_are_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", ((8, 4, 4), (8, 4, 6)))
    table = layers(3)
    assert table.count("AffineLikeLinear") == 2
    assert "(8, 4→6)" in table
    assert "/ LayerNorm+Linear" in table
    assert "1 thread" in table
