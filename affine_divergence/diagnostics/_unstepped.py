# Whether a model learns by steps that its optimiser's hooks do not see.
from __future__ import annotations

from collections import Counter

from affine_divergence.diagnostics._layers import Layer

ENOUGH = 20


class Unstepped:
    """Counts, until the first step that is seen, how often a layer's gradient was dropped after its parameters had changed.

    Accumulated micro-batches drop nothing, steps that a scaler skips and passes for something else change nothing.
    """

    def __init__(self) -> None:
        self._versions: dict[Layer, list[int]] = {}
        self._changed: Counter[Layer] = Counter()
        self._over = False

    def begin(self) -> None:
        """Count anew."""
        self._versions.clear()
        self._changed.clear()
        self._over = False

    def end(self) -> None:
        """A step was seen."""
        self._versions.clear()
        self._over = True

    def dropped(self, layer: Layer) -> bool:
        """Count that its gradient turned out to have been dropped; whether that is now often enough, true once."""
        if self._over:
            return False
        versions = [part.parameter._version for part in layer.parts if part is not None]
        self._changed[layer] += self._versions.get(layer, versions) != versions
        self._versions[layer] = versions
        self._over = self._changed[layer] >= ENOUGH
        return self._over
