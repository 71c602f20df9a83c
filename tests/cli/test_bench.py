# The measurements: that they measure what they say.
from __future__ import annotations

import pytest
import torch
from torch import nn

from affine_divergence.lab.benchmarks import _linear_layers, _training, training
from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import saved_bytes
from affine_divergence.nn import AffineLikeLinear


def test_pieces_take_turns_and_the_warming_up_is_not_counted() -> None:
    calls: list[str] = []
    times = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert calls == ["a", "b"] * 5
    assert set(times) == {"a", "b"}


def test_saved_bytes_are_zero_for_the_corrected_layer_and_the_normalised_rows_for_a_norm_before_a_linear() -> None:
    x = torch.randn(10, 6, requires_grad=True)
    assert saved_bytes(AffineLikeLinear(6, 4), x) == 0
    assert saved_bytes(nn.Sequential(nn.RMSNorm(6, elementwise_affine=False), nn.Linear(6, 4)), x) >= 10 * 6 * 4


def test_the_table_names_every_shape_and_what_the_ratios_are_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear_layers, "SHAPES", ((8, 4, 4), (8, 4, 6)))
    table = "\n".join(_linear_layers.linear_layers(3))
    assert table.count("AffineLikeLinear") == 2
    assert "(8, 4→6)" in table
    assert "/ LayerNorm+Linear" in table
    assert "1 thread" in table


def test_operations_are_two_for_each_weight_and_product() -> None:
    # 3072-16-16-16-10, an image: two products with the first layer's weights, three with those of the other layers.
    assert _training._operations(16) == 2 * (2 * 3072 * 16 + 3 * (16 * 16 + 16 * 16 + 16 * 10))


def test_the_table_of_training_names_every_shape_and_method_and_its_ratios_are_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"IMAGES": 200, "FEATURES": 12, "ROWS_A_ROUND": 64, "REPLICAS": 2, "SHAPES": ((4, 32), (4, 64))}.items():
        monkeypatch.setattr(_training, name, value)
    rows = [line for line in training(3) if line.lstrip().startswith("4 ")]
    names = [*_training.METHODS, _training.ALL]
    assert [(line.split()[1], line[14:27].strip()) for line in rows] == [(batch, name) for batch in ("32", "64") for name in names]
    for line in rows:
        usual, stacked, ratio = map(float, line[27:].split()[:3])
        assert ratio == pytest.approx(stacked / usual, abs=0.01 + ratio * 0.01)


def test_both_sides_of_the_training_bench_train_the_same_trials() -> None:
    for name in (*_training.METHODS, _training.ALL):
        trials = _training._trials(16, 32, name)
        assert len(set(trials)) == len(trials) == (18 if name == _training.ALL else 16)
        for trial in trials:
            weights = [tuple(module.weight.shape) for module in _training._net(trial) if getattr(module, "weight", None) is not None]
            assert weights == [(16, 3072), (16, 16), (16, 16), (10, 16)]
