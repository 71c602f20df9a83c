# Whether a model learns by steps that its optimiser's hooks do not see.
from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from affine_divergence.diagnostics._cleared import asked, stepped_by

if TYPE_CHECKING:
    import torch
    from torch import nn

    from affine_divergence.diagnostics._layers import Layer

ENOUGH = 20


class Unstepped:
    """Counts, until the first step that is seen, how often a layer's gradient was dropped after its parameters had changed.

    Of the parameters that the optimiser has. Accumulated micro-batches drop nothing, steps that a scaler skips and passes for something
    else change nothing, and another optimiser that trains a part of them, as a head first, leaves the others as they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._first: dict[nn.Parameter, int] = {}
        self._versions: dict[Layer, list[int]] = {}
        self._changed: Counter[Layer] = Counter()
        self._over = False

    def begin(self) -> None:
        """Count anew."""
        self._forget()
        self._over = False

    def end(self) -> None:
        """A step was seen."""
        self._forget()
        self._over = True

    def _forget(self) -> None:
        self._first.clear()
        self._versions.clear()
        self._changed.clear()

    def dropped(self, layer: Layer) -> bool:
        """Count that its gradient turned out to have been dropped; whether that tells, once it is often enough."""
        if self._over:
            return False
        stepped = stepped_by(self._optimizer)
        own = [part.parameter for part in asked(layer, stepped) if part.parameter in stepped]
        if not own:
            return False
        self._first = {parameter: self._first.get(parameter, parameter._version) for parameter in stepped}
        versions = [parameter._version for parameter in own]
        self._changed[layer] += self._versions.get(layer, versions) != versions
        self._versions[layer] = versions
        self._over = self._changed[layer] >= ENOUGH
        return self._over and self._learns_as_one(stepped)

    def _learns_as_one(self, stepped: set[nn.Parameter]) -> bool:
        """Whether all that the optimiser has and that had a gradient has changed, and nothing of it is frozen for now."""
        if any(not p.requires_grad for group in self._optimizer.param_groups for p in group["params"]):
            return False
        had = {part.parameter for layer in self._versions for part in asked(layer, stepped)} & stepped
        had |= {p for p in stepped if p.grad is not None}
        return all(p._version != self._first[p] for p in had)
