# What a seed means: initial weights and the order of the images, the same for every method, learning rate and stack.
from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def initial_weight(seed: int, layer: int, n_in: int, n_out: int) -> Tensor:
    """The (n_in, n_out) initial weight of a layer, uniform in ±1/√n_in: the distribution of `nn.Linear`."""
    uniform = torch.rand(n_out, n_in, generator=_generator(f"{seed}/weight/{layer}/{n_out}x{n_in}"))
    weight: Tensor = (2.0 * uniform - 1.0) / n_in**0.5
    return weight.T.contiguous()


def image_order(seed: int, epoch: int, count: int) -> Tensor:
    """The order of the training images in an epoch."""
    return torch.randperm(count, generator=_generator(f"{seed}/order/{epoch}"))


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
