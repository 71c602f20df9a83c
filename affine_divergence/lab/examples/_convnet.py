# The convolutional network among the examples.
from __future__ import annotations

from torch import nn

from ._example import Example, on_digits


def convnet() -> Example:
    """Three convolutions with BatchNorm and ReLU, the mean over positions, a linear classifier."""
    return on_digits(
        lambda: nn.Sequential(
            *_block(1, 16, stride=1),
            *_block(16, 32, stride=2),
            *_block(32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    )


def _block(c_in: int, c_out: int, *, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
