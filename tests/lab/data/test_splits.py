# Splits: which rows go where, and how inputs are standardised.
from __future__ import annotations

import hashlib
import tracemalloc
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch

from affine_divergence.lab.data import Dataset, load, make_splits, split_rows
from affine_divergence.lab.data._permutation import fixed_permutation
from affine_divergence.lab.data._splits import standardising_tables


def made(train: int, test: int, name: str = "cifar10", channels: int = 3, side: int = 32, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    images = [rng.integers(0, 256, (n, channels, side, side), np.uint8) for n in (train, test)]
    # Every channel has its own mean and spread.
    images = [(x // np.arange(1, channels + 1).reshape(-1, 1, 1)).astype(np.uint8) for x in images]
    labels = [rng.integers(0, 10, n) for n in (train, test)]
    for array in images + labels:
        array.flags.writeable = False
    return Dataset(name, "0" * 16, images[0], labels[0], images[1], labels[1], 10)


@pytest.mark.parametrize(
    ("name", "n", "sizes", "pinned"),
    [
        ("cifar10", 50_000, (45_000, 5_000), "adbf95786063e6f6"),
        ("fashion-mnist", 60_000, (54_000, 6_000), "4a131b24518cf1c6"),
        ("digits", 1437, (1149, 288), "38f0abeaca677a3f"),
    ],
)
def test_train_and_validation_are_disjoint_cover_all_and_never_change(name: str, n: int, sizes: tuple[int, int], pinned: str) -> None:
    train, validation = split_rows(name, n)
    assert (len(train), len(validation)) == sizes
    both = np.concatenate([train, validation])
    assert np.array_equal(np.sort(both), np.arange(n))
    # Pinned: another permutation would make old records incomparable.
    assert hashlib.sha256(both.astype("<i8").tobytes()).hexdigest()[:16] == pinned


def test_lossy_and_exact_cifar10_are_split_alike() -> None:
    for one, other in zip(split_rows("cifar10", 50_000), split_rows("cifar10-jpeg", 50_000), strict=True):
        assert np.array_equal(one, other)


def test_a_permutation_depends_on_its_seed() -> None:
    assert not np.array_equal(fixed_permutation(1000, 1), fixed_permutation(1000, 2))


def test_inputs_are_standardised_by_the_train_part_alone() -> None:
    dataset = made(2500, 300)
    rows, held = split_rows("cifar10", 2500)
    splits = make_splits(dataset)
    chosen = dataset.train_images[rows].astype(np.float64)
    mean, deviation = chosen.mean((0, 2, 3), keepdims=True), chosen.std((0, 2, 3), keepdims=True)
    for part, images, labels in (
        (splits.train, dataset.train_images[rows], dataset.train_labels[rows]),
        (splits.validation, dataset.train_images[held], dataset.train_labels[held]),
        (splits.test, dataset.test_images, dataset.test_labels),
    ):
        expected = ((images - mean) / deviation).reshape(len(images), -1)
        assert part.inputs.dtype == torch.float32
        assert part.labels.dtype == torch.int64
        assert part.inputs.is_contiguous()
        torch.testing.assert_close(part.inputs, torch.from_numpy(expected).float(), rtol=1e-6, atol=1e-7)
        assert part.labels.tolist() == labels.tolist()
    assert (splits.name, splits.digest, splits.classes) == ("cifar10", "0" * 16, 10)


def test_the_statistics_are_exact_to_the_last_bit_of_float32() -> None:
    # Values 254 and 255 alone: the variance is a difference of nearly equal sums.
    images = np.random.default_rng(0).integers(254, 256, (50, 2, 8, 8), np.uint8)
    images[:, 1] = np.random.default_rng(1).integers(0, 256, (50, 8, 8), np.uint8)
    rows = np.arange(0, 50, 2)
    tables = standardising_tables(images, rows)
    for channel in range(2):
        values = [int(v) for v in images[rows, channel].ravel()]
        mean = Fraction(sum(values), len(values))
        variance = sum((v - mean) ** 2 for v in values) / len(values)
        with localcontext(prec=50):
            deviation = (Decimal(variance.numerator) / variance.denominator).sqrt()
            exact = [(v - Decimal(mean.numerator) / mean.denominator) / deviation for v in range(256)]
        assert tables[channel].tolist() == np.array([float(value) for value in exact]).astype(np.float32).tolist()


def test_sums_beyond_32_bits_do_not_overflow() -> None:
    images = np.full((3000, 1, 64, 64), 255, np.uint8)  # Σv² = 8e11
    images[:1500] = 253
    table = standardising_tables(images, np.arange(3000))
    assert table[0, 253:256].tolist() == [-1.0, 0.0, 1.0]


def test_a_constant_channel_is_zero_and_not_nan() -> None:
    dataset = made(200, 20)
    images = np.array(dataset.train_images)
    images[:, 1] = 7
    splits = make_splits(Dataset("cifar10", "", images, dataset.train_labels, dataset.test_images, dataset.test_labels, 10))
    assert splits.train.inputs.reshape(-1, 3, 1024)[:, 1].eq(0).all()
    assert splits.validation.inputs.isfinite().all()
    assert splits.test.inputs.isfinite().all()


def test_the_digits_are_split_1149_288_360() -> None:
    digits = load("digits")
    splits = make_splits(digits)
    assert [len(part.inputs) for part in (splits.train, splits.validation, splits.test)] == [1149, 288, 360]
    assert splits.train.inputs.shape[1] == 64
    assert (splits.name, splits.digest, splits.classes) == ("digits", digits.digest, 10)
    assert splits.train.inputs.double().mean().abs() < 1e-7
    assert abs(splits.train.inputs.double().std(correction=0) - 1) < 1e-7


def test_the_peak_of_memory_is_near_the_result() -> None:
    dataset = made(3_000, 12_000)  # most of it comes last, on top of the rest
    tracemalloc.start()
    try:
        splits = make_splits(dataset)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result = sum(part.inputs.nbytes for part in (splits.train, splits.validation, splits.test))
    assert result == 15_000 * 3072 * 4
    assert peak < 1.15 * result
