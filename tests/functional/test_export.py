# torch.export and ONNX: the exported program computes what the map does.
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exporting import Model, onnxruntime_output
from maps import PLAIN, Map, every_kind, every_map
from oracles import close
from torch import Tensor


def _model(map_: Map, dtype: torch.dtype = torch.float32) -> tuple[Model, Tensor]:
    x, weight, bias = map_.tensors(5, 4, 6, dtype=dtype)
    return Model(map_, weight, bias).eval(), x.detach()


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
    close(onnxruntime_output(model, x, tmp_path), model(x))
