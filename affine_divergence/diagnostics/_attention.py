# Seeing the projections of nn.MultiheadAttention, which it applies by functions: `F.linear` tells who called while its forward runs.
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

Seen = Callable[["Tensor", "Tensor", "Tensor"], None]
"""Takes input, weight and output of a linear map."""


class Projections:
    """Between `begin` and `end`, every `F.linear` of this thread is shown to `seen`; what it returns stays what it is."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._thread = 0

    def begin(self) -> None:
        """From now on."""
        self._thread = threading.get_ident()
        with _LOCK:
            _WATCHING.append(self)
            if len(_WATCHING) == 1:
                global _plain_linear
                _plain_linear = F.linear
                F.linear = _linear

    def end(self) -> None:
        """No longer; whoever comes last puts torch's own function back."""
        with _LOCK:
            if self in _WATCHING:
                _WATCHING.remove(self)
                if not _WATCHING:
                    F.linear = _plain_linear

    def show(self, x: Tensor, weight: Tensor, z: Tensor) -> None:
        """Pass on what is this thread's own."""
        if threading.get_ident() == self._thread:
            self._seen(x, weight, z)


_LOCK = threading.Lock()
_WATCHING: list[Projections] = []
_plain_linear: Any = F.linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    z: Tensor = _plain_linear(input, weight, bias)
    for one in tuple(_WATCHING):
        one.show(input, weight, z)
    return z
