# A map as a module, which exporters want, and what onnxruntime makes of it.
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor


class Model(torch.nn.Module):
    def __init__(self, map_: Callable[..., Tensor], weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.map_ = map_
        self.weight = torch.nn.Parameter(weight.detach())
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.map_(x, self.weight, self.bias)


def onnxruntime_output(model: Model, x: Tensor, folder: Path) -> Tensor:
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    program.save(folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (z,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(np.asarray(z))
