# Checks of the batch correction's own arguments, and the errors users read when one is wrong.
from __future__ import annotations

import sys
from typing import Any

from affine_divergence.functional._arguments import is_whole

_LARGEST = sys.float_info.max


def check_damping(damping: float) -> float:
    value = _number("damping", damping)
    if not 0.0 <= value <= _LARGEST:
        raise ValueError(
            f"damping must be zero or positive and finite, got {damping!r}; it is relative to the mean squared length of the rows, "
            "and 0.0 asks for the least-norm solution"
        )
    return value


def check_average(decay: float, every: int) -> tuple[float, int]:
    value = _number("decay", decay)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"decay must be in [0, 1), got {decay!r}; 0.0 keeps no average, 0.95 averages over some 20 backwards")
    if not is_whole(every):
        raise TypeError(f"every must be a whole number, got {type(every).__name__}")
    if every < 1:
        raise ValueError(f"every must be 1 or more, got {every!r}; 1 solves anew at every backward")
    if every > 1 and value == 0.0:
        raise ValueError(
            f"every must be 1 without an average, got {every!r}: each batch is solved with its own Gram matrix, so that there is nothing "
            "to keep; give a decay, such as 0.95"
        )
    return value, every


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got a whole number beyond all floats") from None
