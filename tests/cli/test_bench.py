# The measurements: that they measure what they say.
from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from affine_divergence.lab.benchmarks import _conv_layers, _linear_layers, _training, layers, training
from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import saved_bytes
from affine_divergence.nn import AffineLikeLinear, PatchNormConv2d


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


CONVOLUTIONS = [
    _conv_layers.Shape(4, 4, 8, 8, 3, padding=1),
    _conv_layers.Shape(2, 3, 9, 8, 5, stride=2, padding=2),
    _conv_layers.Shape(4, 6, 8, 6, 3, padding=1, groups=6),
]


@pytest.mark.parametrize("memory_format", _conv_layers.FORMATS.values(), ids=_conv_layers.FORMATS)
@pytest.mark.parametrize("form", ["affine-like", "norm-like"])
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_a_convolution_saves_at_most_one_output_and_two_maps_of_its_positions(
    shape: _conv_layers.Shape, form: str, memory_format: torch.memory_format
) -> None:
    x = torch.randn(shape.images, shape.c_in, shape.side, shape.side).to(memory_format=memory_format).requires_grad_()
    layer = shape.layer(PatchNormConv2d, form=form).to(memory_format=memory_format)  # type: ignore[call-overload]
    z = layer(x)
    assert 0 < saved_bytes(layer, x) <= z.nbytes + 2 * 4 * z[:, 0].numel() * shape.groups


def test_saved_bytes_of_a_batch_norm_are_its_input_and_two_numbers_a_channel() -> None:
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    assert saved_bytes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), x) == 4 * 8 * 3 * 3 * 4 + 2 * 8 * 4


def _only(monkeypatch: pytest.MonkeyPatch, shape: _conv_layers.Shape) -> None:
    monkeypatch.setattr(_linear_layers, "SHAPES", ())
    monkeypatch.setattr(_conv_layers, "SHAPES", (shape,))
    monkeypatch.setattr(_conv_layers, "FORMATS", {"channels_last": torch.channels_last})


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # torch's own, at its first use
def test_the_rows_of_a_convolution_are_in_ratio_to_torchs_eager_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, _conv_layers.Shape(16, 8, 16, 32, 3, padding=1))
    table = [*layers(3)]
    prefix = f"{'(16, 8→32, 16×16) k3 p1':<33}{'channels_last':<15}"
    rows = {line[48:70].strip(): line[70:].split() for line in table if line.startswith(prefix)}
    forms = ["affine-like", "norm-like"]
    assert [*rows] == ["Conv2d", "Conv2d+BatchNorm2d", *forms, *[f"{form} compiled" for form in forms]]
    ms = {name: float(row[0]) for name, row in rows.items()}
    for name, (_, to_plain, to_pair, saved, outputs, maps) in rows.items():
        assert float(to_plain) == pytest.approx(ms[name] / ms["Conv2d"], rel=0.05)
        assert float(to_pair) == pytest.approx(ms[name] / ms["Conv2d+BatchNorm2d"], rel=0.05)
        size = int(saved.replace(",", ""))
        assert float(outputs) == pytest.approx(size / (16 * 32 * 16 * 16 * 4), abs=1e-3)
        assert float(maps) == pytest.approx(size / (16 * 16 * 16 * 4), abs=1e-2)
    assert rows["Conv2d"][1] == rows["Conv2d+BatchNorm2d"][2] == "1.000"


def test_compilation_is_over_before_the_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, CONVOLUTIONS[0])
    events: list[str] = []

    class Compiled(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            events.append(str(self.module.form))
            z: torch.Tensor = self.module(x)
            return z

    def clock(*arguments: Any, **options: Any) -> dict[str, float]:
        events.append("clock")
        return interleaved(*arguments, **options)

    monkeypatch.setattr(torch, "compile", lambda module, **options: Compiled(module))
    monkeypatch.setattr(_conv_layers, "interleaved", clock)
    assert len([*_conv_layers.conv_layers(3)]) == 6 + 6
    assert events[:3] == ["affine-like", "norm-like", "clock"]
    assert events[3:] == 4 * ["affine-like", "norm-like"] + ["affine-like", "norm-like"]  # one warming up, three rounds, what is saved


def test_where_nothing_can_be_compiled_the_table_says_so() -> None:
    code = """if True:
        import torch
        from affine_divergence.lab.benchmarks import _conv_layers
        _conv_layers.SHAPES = (_conv_layers.Shape(2, 3, 4, 4, 3),)
        _conv_layers.FORMATS = {"NCHW": torch.contiguous_format}
        print("\\n".join(_conv_layers.conv_layers(3)))
    """
    environment = {**os.environ, "CXX": "/nowhere/c++"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("cannot be compiled here: InvalidCxxCompiler: No working C++ compiler found") == 2
    assert done.stdout.count(" norm-like ") == 2


def test_operations_are_two_for_each_weight_and_product() -> None:
    # 3072-16-16-16-10, an image: two products with the first layer's weights, three with those of the other layers.
    assert _training._operations(16) == 2 * (2 * 3072 * 16 + 3 * (16 * 16 + 16 * 16 + 16 * 10))


def test_the_table_of_training_names_every_shape_and_method_and_its_ratios_are_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_training, "SHAPES", (("sgd", 4, 32), ("adamw", 4, 64)))
    for name, value in {"IMAGES": 200, "FEATURES": 12, "ROWS_A_ROUND": 64, "REPLICAS": 2}.items():
        monkeypatch.setattr(_training, name, value)
    rows = [line for line in training(3) if line.startswith(("sgd ", "adamw "))]
    names = [*_training.METHODS, _training.ALL]
    shapes = [("sgd", "4", "32"), ("adamw", "4", "64")]
    assert [(*line.split()[:3], line[23:36].strip()) for line in rows] == [(*shape, name) for shape in shapes for name in names]
    for line in rows:
        usual, stacked, ratio = map(float, line[36:].split()[:3])
        assert ratio == pytest.approx(stacked / usual, abs=0.01 + ratio * 0.01)


def test_both_sides_of_the_training_bench_train_the_same_trials() -> None:
    for name in (*_training.METHODS, _training.ALL):
        trials = _training._trials("sgd", 16, 32, name)
        assert len(set(trials)) == len(trials) == (18 if name == _training.ALL else 16)
        for trial in trials:
            weights = [tuple(module.weight.shape) for module in _training._net(trial) if getattr(module, "weight", None) is not None]
            assert weights == [(16, 3072), (16, 16), (16, 16), (10, 16)]
