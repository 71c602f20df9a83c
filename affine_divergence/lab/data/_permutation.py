# Fixed permutations, the same on every machine and for every version of numpy.
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def fixed_permutation(n: int, seed: int) -> NDArray[np.int64]:
    """A random order of 0 … n − 1: the ranks of n raw words of PCG64(seed).

    numpy promises that a bit generator's raw stream stays as it is; it does not promise that for Generator.permutation.

    >>> fixed_permutation(5, seed=0).tolist()
    [3, 2, 1, 0, 4]
    """
    words = np.random.PCG64(seed).random_raw(n)
    return np.argsort(words, kind="stable").astype(np.int64)
