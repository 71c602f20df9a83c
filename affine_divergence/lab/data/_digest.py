# Digests: of decoded arrays (what a record names) and of source files (what the cache is keyed by).
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

_HEX = 16
_BLOCK = 1 << 20


def digest_arrays(arrays: Iterable[NDArray[Any]]) -> str:
    """The first 16 hex digits of SHA-256 over dtype, shape and bytes of every array, in order."""
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(f"{array.dtype.str} {array.shape}\n".encode())
        # Blocks of rows, so that a memory-mapped array is never copied whole.
        rows = max(1, _BLOCK // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            hasher.update(np.ascontiguousarray(array[start : start + rows]).data)
    return hasher.hexdigest()[:_HEX]


def digest_files(root: Path, files: Iterable[Path]) -> str:
    """The first 16 hex digits of SHA-256 over the files' names below root, lengths and bytes, in order."""
    hasher = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            inner = hashlib.file_digest(file, "sha256").hexdigest()
        hasher.update(f"{path.relative_to(root).as_posix()!r} {inner}\n".encode())
    return hasher.hexdigest()[:_HEX]
