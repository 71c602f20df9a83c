# Estimates of a trial's CPU time, without timing anything: they bound the size of stacks and weigh progress.
#
# The four constants were fitted to records/fully-connected: they reproduce the mean CPU time of each of its shapes within 20 %. A machine
# may be twice as slow, as that of records/fully-connected-3x64 was; the proportions between shapes stay much the same.
from __future__ import annotations

import math
from typing import NamedTuple

from affine_divergence.lab.pattern import kernels
from affine_divergence.lab.trial import FOOF_REFRESH, Trial

STEP, OPERATION, ACTIVATION, WEIGHT = 8.4e-5, 9.0e-12, 8.3e-9, 1.3e-10  # seconds for each of them
CONVOLVED = 2.0  # convolutions take this many times the seconds of a product with as many operations
ADAMW = 2.0e-9  # seconds for a weight and a step


class Images(NamedTuple):
    """The images of a data set in each part, and their form."""

    train: int
    validation: int
    test: int
    channels: int
    side: int


CIFAR = Images(45_000, 5_000, 10_000, 3, 32)
IMAGES = {
    "digits": Images(1_149, 288, 360, 1, 8),
    "cifar10": CIFAR,
    "cifar10-jpeg": CIFAR,
    "fashion-mnist": Images(54_000, 6_000, 10_000, 1, 28),
}
CLASSES = 10


def images_of(trial: Trial) -> Images:
    """The images that a trial uses."""
    images = IMAGES.get(trial.data, CIFAR)
    return images._replace(train=min(trial.train_images or images.train, images.train))


def steps_an_epoch(trial: Trial) -> int:
    """Minibatches of an epoch."""
    count, size = images_of(trial).train, trial.batch_size
    return max(1, count // size if trial.drop_last else math.ceil(count / size))


def steps_of(trial: Trial) -> int:
    """Optimiser steps of a trial."""
    return trial.steps or (trial.epochs or 1) * steps_an_epoch(trial)


def evaluations_of(trial: Trial) -> int:
    """How many images are classified during and after the training."""
    images, epochs = images_of(trial), math.ceil(steps_of(trial) / steps_an_epoch(trial))
    return epochs * images.validation + (images.test if trial.role == "evaluation" else 0)


def nominal_seconds(trial: Trial) -> float:
    """CPU seconds of a trial in a stack, on the core that the constants were measured on."""
    first, rest, activations, weights = _convolutional(trial) if trial.pattern else _fully_connected(trial)
    size = trial.batch_size
    operations = size * (4.0 * first + 6.0 * rest) + _correcting(trial)
    step = STEP + OPERATION * operations + ACTIVATION * size * activations + (ADAMW if trial.optimizer == "adamw" else WEIGHT) * weights
    return steps_of(trial) * step + evaluations_of(trial) * 2.0 * OPERATION * (first + rest)


def _fully_connected(trial: Trial) -> tuple[float, float, float, float]:
    # Products of an image in the first layer and in the others, numbers that pass through activations, weights of the first layer.
    width, depth = trial.width, trial.depth
    first = _pixels(trial) * width
    return first, (depth - 1) * width**2 + width * CLASSES, depth * width + CLASSES, first


def _convolutional(trial: Trial) -> tuple[float, float, float, float]:
    side, channels = images_of(trial).side, images_of(trial).channels
    products, activations, weights = [], 0.0, 0.0
    for kernel in kernels(trial.pattern or "", trial.depth):
        side = -(-side // kernel.stride)
        own = channels * trial.width * kernel.size**2
        products.append(CONVOLVED * side**2 * own)
        activations += side**2 * trial.width
        weights += own
        channels = trial.width
    return products[0], sum(products[1:]), activations, weights


def _correcting(trial: Trial) -> float:
    # Operations of a step of the gradient-only corrections, mostly on the images.
    pixels, size = _pixels(trial), trial.batch_size
    if trial.method == "foof":
        return 4.0 * size * pixels**2 + 2.0 * pixels**3 / FOOF_REFRESH
    return 2.0 * size**2 * pixels if trial.method == "batch" else 0.0


def _pixels(trial: Trial) -> int:
    images = images_of(trial)
    return images.channels * images.side**2
