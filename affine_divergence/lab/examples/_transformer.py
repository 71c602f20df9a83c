# The transformer among the examples.
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ._example import Example, on_digits

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 2
TOKENS = (8 // PATCH) ** 2
WIDTH = 32


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


def transformer() -> Example:
    """Patches of 2 × 2 pixels, two encoder layers of width 32 with four heads, the mean over tokens, a linear classifier."""
    return on_digits(_Transformer)
