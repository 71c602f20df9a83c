# What a diagnosis was made of and what was assumed, for whoever reads it later.
from __future__ import annotations

import math
from typing import Any

import torch

from affine_divergence.diagnostics._change import rate_of


def about(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    plain: bool,
    training: bool,
    inputs: dict[str, int],
    assumed: bool = False,
    loss_scale: float = 1.0,
) -> dict[str, Any]:
    """By plain values that JSON can hold; assumed: the optimiser and its rate were not given, inputs: d by layer."""
    rates = sorted({rate for group in optimizer.param_groups if not math.isnan(rate := rate_of(group))})
    return {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "mode": "train" if training else "eval",
        "optimizer": type(optimizer).__name__,
        "lr": rates,
        "lr assumed": assumed,
        "plain": plain,
        "loss scale": loss_scale,
        "inputs": inputs,
        "scope": "each layer's own parameters, first order",
        "torch": torch.__version__,
    }
