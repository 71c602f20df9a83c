# Which rows of a data set train and which validate.
from __future__ import annotations

from typing import TYPE_CHECKING

from ._permutation import fixed_permutation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VALIDATION_SEED = 20_260_101
# 5,000 of CIFAR-10's 50,000; of the 1,437 digits a tenth would be 144, too few to choose a learning rate by.
_ONE_IN = {"digits": 5}


def split_rows(name: str, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of n rows train and which validate: one in ten validates, one in five of the digits, rounded up."""
    held = -(-n // _ONE_IN.get(name, 10))
    order = fixed_permutation(n, VALIDATION_SEED)
    return order[held:], order[:held]
