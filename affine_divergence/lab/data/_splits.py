# Splits: train, validation and test as standardised float32 rows, ready for a training that holds everything in memory.
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np
import torch

from ._rows import split_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

    from ._dataset import Dataset

_CHUNK = 1000


@dataclass(frozen=True, eq=False)
class Part:
    """Inputs (N, d) float32, standardised, and labels (N,) int64."""

    inputs: Float[Tensor, "n d"]
    labels: Int[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class Splits:
    """The three parts of a data set: weights from `train`, choices by `validation`, results on `test`; `shape` (C, H, W) of an image."""

    name: str
    digest: str
    classes: int
    shape: tuple[int, int, int]
    train: Part
    validation: Part
    test: Part

    @cached_property
    def by_pixel(self) -> Splits:
        """The same with every pixel of every channel standardised by its own mean and deviation over the train part.

        A constant pixel is only centred.
        """
        mean, deviation = _moments(self.train.inputs)
        parts = (Part((part.inputs - mean).div_(deviation), part.labels) for part in (self.train, self.validation, self.test))
        return Splits(self.name, self.digest, self.classes, self.shape, *parts)


def _moments(rows: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
    # In float64, in chunks: rounding could make a constant column look as if it varied.
    parts = [chunk.double() for chunk in rows.split(_CHUNK)]
    mean = torch.stack([part.sum(0) for part in parts]).sum(0) / len(rows)
    variance = torch.stack([(part - mean).square_().sum(0) for part in parts]).sum(0) / len(rows)
    deviation = variance.sqrt()
    deviation[deviation < 1e-6] = 1.0
    return mean.to(rows), deviation.to(rows)


def make_splits(dataset: Dataset) -> Splits:
    """Splits a data set by a fixed permutation and standardises each channel by mean and deviation of the train part.

    CIFAR-10: 45,000 / 5,000 / 10,000 images; Fashion-MNIST: 54,000 / 6,000 / 10,000; digits: 1149 / 288 / 360.
    Rows are flattened in the order C, H, W.
    """
    train, validation = split_rows(dataset.name, len(dataset.train_images))
    tables = standardising_tables(dataset.train_images, train)
    everything = np.arange(len(dataset.test_images))
    channels, height, width = dataset.train_images.shape[1:]
    return Splits(
        dataset.name,
        dataset.digest,
        dataset.classes,
        (channels, height, width),
        _part(dataset.train_images, dataset.train_labels, train, tables),
        _part(dataset.train_images, dataset.train_labels, validation, tables),
        _part(dataset.test_images, dataset.test_labels, everything, tables),
    )


def standardising_tables(images: NDArray[np.uint8], rows: NDArray[np.int64]) -> Float[np.ndarray, "c 256"]:
    """(v − mean) / deviation of every channel for every pixel value v = 0 … 255, statistics over the given rows.

    The sums are integers, so that mean and variance are exact to float64; a constant channel is only centred.
    """
    channels = images.shape[1]
    total, square = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
    for start in range(0, len(rows), _CHUNK):
        chunk = images[rows[start : start + _CHUNK]]
        total += chunk.sum((0, 2, 3), dtype=np.int64)
        square += np.square(chunk, dtype=np.uint16).sum((0, 2, 3), dtype=np.int64)
    n = len(rows) * images.shape[2] * images.shape[3]
    tables = np.empty((channels, 256))
    for channel in range(channels):
        s, q = int(total[channel]), int(square[channel])
        # In Python's integers: n² var = n Σv² − (Σv)² is beyond 64 bits for CIFAR-10.
        deviation = sqrt(n * q - s * s) / n
        tables[channel] = (np.arange(256) - s / n) / (deviation or 1.0)
    return tables.astype(np.float32)


def _part(images: NDArray[np.uint8], labels: NDArray[np.int64], rows: NDArray[np.int64], tables: Float[np.ndarray, "c 256"]) -> Part:
    channels, pixels = images.shape[1], images.shape[2] * images.shape[3]
    inputs = np.empty((len(rows), channels, pixels), np.float32)
    # In chunks: the result alone takes 737 MB for CIFAR-10.
    for start in range(0, len(rows), _CHUNK):
        chunk = images[rows[start : start + _CHUNK]].reshape(-1, channels, pixels)
        for channel in range(channels):
            inputs[start : start + _CHUNK, channel] = tables[channel][chunk[:, channel]]
    return Part(torch.from_numpy(inputs.reshape(len(rows), -1)), torch.from_numpy(labels[rows]))
