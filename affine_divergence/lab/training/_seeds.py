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


def orthogonal_weight(seed: int, layer: int, n_in: int, n_out: int) -> Tensor:
    """A float64 (n_in, n_out) weight with orthonormal columns, or rows where it has fewer rows, uniform over all such matrices."""
    tall, short = max(n_in, n_out), min(n_in, n_out)
    drawn = torch.randn(tall, short, generator=_generator(f"{seed}/orthogonal/{layer}/{n_out}x{n_in}"), dtype=torch.float64)
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal().sign()
    weight: Tensor = q if n_in >= n_out else q.T.contiguous()
    return weight


def image_order(seed: int, epoch: int, count: int) -> Tensor:
    """The order of the training images in an epoch."""
    return torch.randperm(count, generator=_generator(f"{seed}/order/{epoch}"))


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
