# The embedded digits.
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from affine_divergence.lab.data import load
from affine_divergence.lab.errors import BadInputError


def _rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


def test_train_and_test_together_are_scikit_learns_digits() -> None:
    digits, (pixels, labels) = load("digits"), load_digits(return_X_y=True)
    assert (digits.name, digits.classes) == ("digits", 10)
    assert (digits.train_images.shape, digits.test_images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (digits.train_images.dtype, digits.train_labels.dtype) == (np.uint8, np.int64)
    assert (digits.test_images.dtype, digits.test_labels.dtype) == (np.uint8, np.int64)
    images = np.concatenate([digits.train_images, digits.test_images])
    assert images.max() == 16
    both = _rows(images, np.concatenate([digits.train_labels, digits.test_labels]))
    assert both == _rows(pixels.astype(np.uint8), labels)


def test_every_class_is_in_the_test_part() -> None:
    # The file is ordered by writer, not by class: 360 of 1797 hold 36 of each on average.
    assert np.bincount(load("digits").test_labels, minlength=10).min() >= 20


def test_the_test_part_is_the_same_for_ever() -> None:
    # Pinned: another permutation, or another file in scikit-learn, would make old records incomparable.
    assert load("digits").digest == "086e3d0c7b1655d4"


def test_a_path_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"digits is embedded and takes no path, .*somewhere came; write --data digits"):
        load("digits", Path("somewhere"))
