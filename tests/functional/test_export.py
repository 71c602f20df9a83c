# torch.export and ONNX: the exported program computes what the map does.
from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from maps import PLAIN, Map, every_kind, every_map
from oracles import close
from torch import Tensor


class _Model(torch.nn.Module):
    def __init__(self, map_: Map, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.map_ = map_
        self.weight = torch.nn.Parameter(weight.detach())
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.map_(x, self.weight, self.bias)


def _model(map_: Map, dtype: torch.dtype = torch.float32) -> tuple[_Model, Tensor]:
    x, weight, bias = map_.tensors(5, 4, 6, dtype=dtype)
    return _Model(map_, weight, bias).eval(), x.detach()


@every_map
def test_an_exported_program_computes_the_map(map_: Map) -> None:
    model, x = _model(map_, torch.float64)
    program = torch.export.export(model, (x,))
    close(program.module()(x), model(x))


@every_kind
def test_an_exported_program_with_a_dynamic_batch_takes_other_batches(map_: Map) -> None:
    model, x = _model(map_, torch.float64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    more = torch.randn(17, 5, dtype=torch.float64)
    close(program.module()(more), model(more))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch's own, in its exporter
@pytest.mark.parametrize("map_", PLAIN, ids=str)
def test_onnxruntime_computes_the_map(map_: Map, tmp_path: Path) -> None:
    model, x = _model(map_)
    x[1] = 0.0
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (z,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    close(torch.from_numpy(np.asarray(z)), model(x))
