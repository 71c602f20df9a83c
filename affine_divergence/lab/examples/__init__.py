# Small networks as people write them, at initialisation, with a batch and a loss: what affdiv diagnose shows without a model of one's own.
# The networks are resolved when first used: the command line lists them without importing torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._example import Example as Example

EXAMPLES = {
    "mlp": "three hidden layers of ReLU",
    "convnet": "three convolutions with BatchNorm",
    "transformer": "two pre-norm encoder layers over patches",
}


def example(name: str) -> Example:
    """A network of EXAMPLES with its batch of scikit-learn's digits and its loss: the same numbers at every call."""
    made: Example = getattr(importlib.import_module(f"{__name__}._{name}"), name)()
    return made
