# Digests of arrays longer than one block of hashing.
from __future__ import annotations

import hashlib

import numpy as np
import pytest

from affine_divergence.lab.data._digest import digest_arrays


def test_an_array_of_several_blocks_is_hashed_to_its_last_row() -> None:
    # CIFAR-10's arrays are 150 blocks of 1 MiB; those of the other tests are less than one.
    array = np.random.default_rng(0).integers(0, 256, (1000, 3, 32, 32), np.uint8)
    defined = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode() + array.tobytes()).hexdigest()[:16]
    assert digest_arrays([array]) == defined
    last = array.copy()
    last[-1, -1, -1, -1] ^= 1
    assert digest_arrays([last]) != defined


@pytest.mark.parametrize("other", [np.zeros((4, 3), np.uint8), np.zeros((3, 4), np.int8), np.zeros((3, 4), np.uint8)[:, ::-1]])
def test_shape_and_dtype_are_hashed_and_strides_are_not(other: np.ndarray) -> None:
    array = np.zeros((3, 4), np.uint8)
    same = (other.shape, other.dtype) == (array.shape, array.dtype)
    assert (digest_arrays([array]) == digest_arrays([other])) == same
