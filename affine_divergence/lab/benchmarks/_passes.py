# One forward and backward of a module: what is timed, and what it saves in between.
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def one_pass(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """The forward and backward, to be called again and again."""

    def run() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(upstream)

    return run


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that the forward saves for the backward beyond its input, parameters and buffers."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)  # kept alive, so that no two storages get one address
    del output
    return sum(saved.values())
