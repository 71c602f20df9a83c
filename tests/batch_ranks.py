# What the processes of a group compute with batch-corrected layers, each its part of a batch; run by `spawned`, compared by the tests.
from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import affine_divergence.gradient as ag
import affine_divergence.nn as ann

WIDE = torch.float64

CASES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "linear, dual": (ann.BatchCorrectedLinear, {"in_features": 9, "out_features": 3}, (8, 9)),
    "linear, primal": (ann.BatchCorrectedLinear, {"in_features": 9, "out_features": 3, "bias": False}, (20, 2, 9)),
    "each half dual, the whole primal": (ann.BatchCorrectedLinear, {"in_features": 9, "out_features": 3, "damping": 0.1}, (16, 9)),
    "linear, average": (ann.BatchCorrectedLinear, {"in_features": 9, "out_features": 3, "decay": 0.5, "every": 2}, (8, 9)),
    "convolution, dual": (ann.BatchCorrectedConv2d, {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2}, (2, 4, 4, 4)),
    "convolution, primal": (
        ann.BatchCorrectedConv2d,
        {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        (4, 2, 4, 4),
    ),
    "convolution, average": (ann.BatchCorrectedConv1d, {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "decay": 0.7}, (4, 2, 6)),
}
STEPS = 3


def layer_and_batches(case: str) -> tuple[Any, list[Tensor]]:
    """The layer without a group, and a batch for each step: the same in every process."""
    make, options, shape = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    torch.manual_seed(0)
    return make(**options, dtype=WIDE), [torch.randn(shape, dtype=WIDE, generator=generator) for _ in range(STEPS)]


def loss(z: Tensor) -> Tensor:
    """A mean, and not quadratic."""
    return (3 * z).sin().mean() + z.square().mean()


def spawned(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """By process, what each of the functions here returns in it."""
    torch.multiprocessing.spawn(_process, (ranks, str(folder), sys.path), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _process(rank: int, ranks: int, folder: str, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=timeout)
    try:
        torch.save({"halves": halves(rank), "uneven": uneven(rank), "function": function(rank)}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def halves(rank: int) -> dict[str, list[Any]]:
    """Under DistributedDataParallel, half a batch each: gradients and share of every step."""
    results: dict[str, list[Any]] = {}
    for case in CASES:
        layer, batches = layer_and_batches(case)
        layer.process_group = dist.group.WORLD
        model = DistributedDataParallel(layer)
        results[case] = []
        for batch in batches:
            model.zero_grad()
            loss(model(batch.chunk(2)[rank])).backward()
            results[case].append(([p.grad.clone() for p in layer.parameters()], layer.realised_share))
    return results


def uneven(rank: int) -> dict[str, list[list[Tensor]]]:
    """Of parts of any sizes, even none: each process's contribution to the gradient of the sum over all rows."""
    results: dict[str, list[list[Tensor]]] = {}
    for case in CASES:
        layer, batches = layer_and_batches(case)
        layer.process_group = dist.group.WORLD
        results[case] = []
        for step, batch in enumerate(batches):
            layer.zero_grad()
            cut = (1, len(batch) - 1, len(batch))[step]  # the last time the second process has nothing
            layer((batch[:cut], batch[cut:])[rank]).sin().sum().backward()
            results[case].append([p.grad.clone() for p in layer.parameters()])
    return results


def function(rank: int) -> list[Tensor]:
    """Of the functions: each process's contribution to the gradient of the sum."""
    x, weight, image, kernel = arguments_of_functions()
    ag.batch_corrected_linear(x.chunk(2)[rank], weight, process_group=dist.group.WORLD).cos().sum().backward()
    ag.batch_corrected_conv2d(image.chunk(2)[rank], kernel, process_group=dist.group.WORLD).cos().sum().backward()
    assert weight.grad is not None
    assert kernel.grad is not None
    return [weight.grad, kernel.grad]


def arguments_of_functions() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 9), (3, 9), (2, 4, 4, 4), (6, 4, 3, 3)]
    return [torch.randn(s, dtype=WIDE, generator=generator).requires_grad_(i % 2 == 1) for i, s in enumerate(shapes)]
