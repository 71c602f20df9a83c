# The multilayer perceptron among the examples.
from __future__ import annotations

from torch import nn

from ._example import Example, on_digits

WIDTH = 128


def mlp() -> Example:
    """64 pixels, three hidden layers of ReLU, ten classes."""
    return on_digits(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )
    )
