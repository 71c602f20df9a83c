# One call of a layer, as it was seen.
from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._attention import Layout
from affine_divergence.diagnostics._layers import Layer
from affine_divergence.diagnostics._storages import place_of

if TYPE_CHECKING:
    from torch import Tensor


class Call:
    """One call of a layer: its input, ∂L/∂z, and what tells whether they still are what they were."""

    __slots__ = ("_versions", "counted", "g", "inside", "layer", "layout", "options", "passed", "round", "sequence", "x")

    def __init__(self, layer: Layer, x: Tensor, options: Sequence[Any], layout: Layout | None, round_: int, sequence: int) -> None:
        self.layout = layout
        self.layer, self.x, self.options, self.round, self.sequence = layer, x.detach(), options, round_, sequence
        self.g: Tensor | None = None
        self.passed = -1  # the last backward by which a gradient arrived
        self.inside = torch._C._current_graph_task_id()  # the backward that it was made in, as recomputed for a checkpoint, or -1
        self.counted = False  # among the forward calls
        self._versions: tuple[int | None, int | None] = (_version(x), None)

    def arrive(self, g: Tensor, passed: int) -> None:
        """A gradient at the output; several of one call, as of two losses, are one sum."""
        self.g = g if self.g is None else self.g + g
        self.passed = passed
        self._versions = (self._versions[0], _version(self.g))

    def keep_input(self, places: Container[int]) -> None:
        """Take a copy of an input that lies in one of these storages: it is a parameter, or a view of one, which the step changes."""
        if place_of(self.x) in places and not self.changed_input():
            self.x = _copied(self.x)
            self._versions = _version(self.x), self._versions[1]

    def changed_input(self) -> bool:
        """Whether it was changed in place since it was seen."""
        return _version(self.x) != self._versions[0]

    def changed(self) -> str | None:
        """Which of both was changed in place since it was seen."""
        assert self.g is not None
        if self.changed_input():
            return "its input"
        return "the gradient at its output" if _version(self.g) != self._versions[1] else None


def _copied(x: Tensor) -> Tensor:
    """A copy in which what was expanded is expanded again."""
    return x[tuple(slice(None, 1) if stride == 0 else slice(None) for stride in x.stride())].clone().expand(x.shape)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
