# The real images, where the test run is given them.
from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from affine_divergence.lab.data import Dataset, _fashion, load, make_splits
from affine_divergence.lab.errors import BadInputError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _load(path: Path, cache: Path) -> Dataset:
    # The copy given may be lossy or not; only one of the names is right for it.
    try:
        return load("cifar10", path, cache=cache)
    except BadInputError:
        return load("cifar10-jpeg", path, cache=cache)


def test_the_real_images_load_quickly_and_quicker_the_second_time(cifar10: Path, cache: Path) -> None:
    start = time.perf_counter()
    first = _load(cifar10, cache)
    assert time.perf_counter() - start < 40
    start = time.perf_counter()
    second = load(first.name, cifar10, cache=cache)
    assert time.perf_counter() - start < 2
    assert first.digest == second.digest
    assert first.train_images.shape == (50_000, 3, 32, 32)
    assert first.test_images.shape == (10_000, 3, 32, 32)
    assert np.bincount(first.train_labels).tolist() == [5000] * 10
    assert np.bincount(first.test_labels).tolist() == [1000] * 10


def test_the_real_images_have_the_known_channel_means(cifar10: Path, cache: Path) -> None:
    # 0.4914, 0.4822, 0.4465 and 0.2470, 0.2435, 0.2616 for all 50,000; lossy copies differ in the fourth digit or so.
    images = _load(cifar10, cache).train_images
    means, squares = (np.mean([np.power(images[i : i + 1000] / 255, p).mean((0, 2, 3)) for i in range(0, 50_000, 1000)], 0) for p in (1, 2))
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=2e-3)
    np.testing.assert_allclose(np.sqrt(squares - means**2), [0.2470, 0.2435, 0.2616], atol=3e-3)


def test_the_real_images_are_split_and_standardised(cifar10: Path, cache: Path) -> None:
    splits = make_splits(_load(cifar10, cache))
    assert [part.inputs.shape for part in (splits.train, splits.validation, splits.test)] == [(45_000, 3072), (5_000, 3072), (10_000, 3072)]
    channels = splits.train.inputs.view(45_000, 3, 1024)
    torch.testing.assert_close(channels.mean((0, 2), dtype=torch.float64), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6)
    for channel in range(3):
        assert abs(channels[:, channel].double().std(correction=0) - 1) < 1e-6


def test_debians_fashion_mnist_is_read_where_its_package_puts_it(cache: Path) -> None:
    if not _fashion.DEBIAN.exists():
        pytest.skip("dataset-fashion-mnist is not installed")
    dataset = load("fashion-mnist", cache=cache)
    assert dataset.digest == "475596a4df190dcf"
    assert dataset.train_images.shape == (60_000, 1, 28, 28)
    assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1000] * 10
    assert make_splits(dataset).validation.inputs.shape == (6_000, 784)
