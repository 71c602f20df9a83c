# The digits inside scikit-learn: 1797 images of 8 × 8, the embedded default.
from __future__ import annotations

import numpy as np

from ._dataset import Dataset
from ._digest import digest_arrays
from ._permutation import fixed_permutation

TEST = 360
TEST_SEED = 20_251_222


def load_digits() -> Dataset:
    """The digits, pixels 0 … 16; they come without a test split, so a fixed permutation sets 360 images aside."""
    from sklearn.datasets import load_digits as read

    images, labels = read(return_X_y=True)
    pixels = np.asarray(images).astype(np.uint8).reshape(-1, 1, 8, 8)
    targets = np.asarray(labels).astype(np.int64)
    order = fixed_permutation(len(pixels), TEST_SEED)
    test, train = order[:TEST], order[TEST:]
    arrays = (pixels[train], targets[train], pixels[test], targets[test])
    for array in arrays:
        array.flags.writeable = False
    return Dataset("digits", digest_arrays(arrays), *arrays, classes=10)
