# Where the numbers of tensors lie: what tells that two of them share memory.
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def places(tensors: Iterable[Tensor]) -> set[int]:
    """Of those that have a storage."""
    return {place for tensor in tensors if (place := place_of(tensor))}


def place_of(tensor: Tensor) -> int:
    """Where its storage lies; 0 where it has none, as a sparse one or a wrapper of others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
