# A data set as decoded: integer pixels and labels, with the digest that names them in every record.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Dataset:
    """Decoded images and labels, not yet split or standardised; the arrays are read-only and may be memory-mapped.

    Images are uint8 (N, C, H, W), labels int64 (N,) in 0 … classes − 1. `digest` is the start of a SHA-256 over the four arrays:
    equal digests mean equal arrays, whatever form the images came in.
    """

    name: str
    digest: str
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    classes: int
