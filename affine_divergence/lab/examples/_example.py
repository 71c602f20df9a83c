# What an example is: a network at initialisation from a fixed seed, a batch of the digits, the loss.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from affine_divergence.lab.data import load, make_splits

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 128
SEED = 0


class Example(NamedTuple):
    """A network, its batch, and loss_fn(output, targets)."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]


def on_digits(network: Callable[[], nn.Module]) -> Example:
    """The network, drawn from SEED, on the first training images, standardised, as (N, 1, 8, 8)."""
    splits = make_splits(load("digits"))
    images, labels = splits.train.inputs[:BATCH], splits.train.labels[:BATCH]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = network()
    return Example(model, images.reshape(-1, *splits.shape).clone(), labels.clone(), F.cross_entropy)
