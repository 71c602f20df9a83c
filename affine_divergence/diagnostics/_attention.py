# Seeing the projections of nn.MultiheadAttention, which it applies by functions: `F.linear` tells who called while its forward runs.
from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

Seen = Callable[["Tensor", "Tensor", "Tensor"], None]
"""Takes input, weight and output of a linear map."""


@dataclass(frozen=True)
class Layout:
    """How the tokens lie that the module is given; inside, and as rows of its projections, they are (token, batch)."""

    batch: int | None  # its size, where there is such an axis
    batch_first: bool

    @property
    def swapped(self) -> bool:
        """Whether batch and token are the other way round inside."""
        return self.batch_first and self.batch is not None

    def axes(self, rows: int) -> tuple[int, ...]:
        """Of so many tokens, as the module is given them."""
        if self.batch is None:
            return (rows,)
        tokens = rows // max(1, self.batch)
        return (self.batch, tokens) if self.batch_first else (tokens, self.batch)


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
