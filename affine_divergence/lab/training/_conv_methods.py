# What each method does around a convolution and around the affine head, for the replicas of a stack, which all use it.
#
# Images: x (B, G·C, H, W) in G groups, weight (K·C_out, C, k, k). Rows: x (K, B, C), weight (K, C, classes). No method has parameters.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from affine_divergence.functional import affine_like_conv2d, norm_like_conv2d
from affine_divergence.functional._rows import DEFAULT_EPS, inverse_norm
from affine_divergence.lab.pattern import Kernel
from affine_divergence.lab.training._methods import MOMENTUM, TORCH_EPS
from affine_divergence.lab.trial import Method


class Convolve(Protocol):
    """A convolution with its method."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, kernel: Kernel, groups: int, training: bool) -> Tensor: ...


class Affine(Protocol):
    """An affine layer with its method."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor: ...


class Kind(NamedTuple):
    """A method's convolution of G groups of C channels, and its affine layer of K replicas of C features."""

    images: Callable[[int, int, Tensor], Convolve]
    rows: Callable[[int, int, Tensor], Affine]


class BatchNorm:
    """Features centred and scaled over the batch, and over positions, with running statistics for each group, or replica, of features.

    The running statistics are used outside training, and for one value a feature, which torch refuses.
    """

    def __init__(self, groups: int, features: int, like: Tensor) -> None:
        self._groups = groups
        self._mean, self._var = like.new_zeros(groups * features), like.new_ones(groups * features)

    def keep(self, index: Tensor) -> None:
        """Go on with some of the groups."""
        self._mean, self._var = (one.view(self._groups, -1)[index].flatten() for one in (self._mean, self._var))
        self._groups = len(index)

    def normalised(self, x: Tensor, training: bool) -> Tensor:
        """Of x, whose dimension 1 holds the features of all groups."""
        of_batch = training and x.numel() > x.shape[1]
        return F.batch_norm(x, self._mean, self._var, training=of_batch, momentum=MOMENTUM, eps=TORCH_EPS)


def _by_position(normalise: Callable[[Tensor], Tensor], x: Tensor, groups: int) -> Tensor:
    # The channels of a group stand side by side in memory, as rows do.
    rows: Tensor = x.permute(0, 2, 3, 1).unflatten(-1, (groups, -1))
    return normalise(rows).flatten(-2).permute(0, 3, 1, 2)


def _layer_norm(rows: Tensor) -> Tensor:
    return F.layer_norm(rows, rows.shape[-1:], eps=TORCH_EPS)


def _rms_norm(rows: Tensor) -> Tensor:
    return F.rms_norm(rows, rows.shape[-1:], eps=DEFAULT_EPS)


def _layer_norm_sample(x: Tensor, groups: int) -> Tensor:
    return torch.group_norm(x, groups, eps=TORCH_EPS)  # not F.group_norm, which refuses a group of one number


def _rms_norm_sample(x: Tensor, groups: int) -> Tensor:
    # First over positions, then over a group's channels: both at once takes twice as long where channels are last.
    square: Tensor = x.square().mean((2, 3)).unflatten(1, (groups, -1)).mean(-1)
    scale = (square + DEFAULT_EPS).rsqrt().repeat_interleave(x.shape[1] // groups, 1)
    return x * scale[:, :, None, None]


def _plain(x: Tensor, weight: Tensor, bias: Tensor, kernel: Kernel, groups: int) -> Tensor:
    return F.conv2d(x, weight, bias, kernel.stride, kernel.size // 2, groups=groups)


def _after(normalise: Callable[[Tensor, int], Tensor], rows: Callable[[Tensor], Tensor]) -> Kind:
    # The plain map of what a normaliser without statistics makes of its input.
    def convolve(x: Tensor, weight: Tensor, bias: Tensor, kernel: Kernel, groups: int, training: bool) -> Tensor:
        return _plain(normalise(x, groups), weight, bias, kernel, groups)

    def affine(x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
        return torch.baddbmm(bias, rows(x), weight)

    return Kind(lambda *_: convolve, lambda *_: affine)


class _BatchNormed(BatchNorm):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, kernel: Kernel, groups: int, training: bool) -> Tensor:
        return _plain(self.normalised(x, training), weight, bias, kernel, groups)


class _BatchNormedRows(BatchNorm):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
        side_by_side = self.normalised(x.transpose(0, 1).flatten(1), training)
        return torch.baddbmm(bias, side_by_side.view(-1, len(x), x.shape[-1]).transpose(0, 1), weight)


def _corrected(convolve: Callable[..., Tensor], rows: Callable[[Tensor, Tensor, Tensor], Tensor], *, gain: bool) -> Kind:
    # A correction at gain 1, or at √(d + 1) for the d numbers of a patch, or of a row.
    def convolution(x: Tensor, weight: Tensor, bias: Tensor, kernel: Kernel, groups: int, training: bool) -> Tensor:
        c = _gain(weight[0].numel()) if gain else 1.0
        return convolve(x, weight, bias, kernel.stride, kernel.size // 2, groups=groups, gain=c)

    def affine(x: Tensor, weight: Tensor, bias: Tensor, training: bool) -> Tensor:
        z = rows(x, weight, bias)
        return _gain(x.shape[-1]) * z if gain else z

    return Kind(lambda *_: convolution, lambda *_: affine)


def _gain(numbers: int) -> float:
    return math.sqrt(numbers + 1)


def _norm_like_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x * inverse_norm(x, DEFAULT_EPS), weight)


def _affine_like_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias, x, weight) * inverse_norm(x, 1.0)


METHODS: dict[Method, Kind] = {
    "none": _after(lambda x, groups: x, lambda rows: rows),
    "batch-norm": Kind(_BatchNormed, _BatchNormedRows),
    "layer-norm-sample": _after(_layer_norm_sample, _layer_norm),
    "layer-norm-position": _after(lambda x, groups: _by_position(_layer_norm, x, groups), _layer_norm),
    "rms-norm-sample": _after(_rms_norm_sample, _rms_norm),
    "rms-norm-position": _after(lambda x, groups: _by_position(_rms_norm, x, groups), _rms_norm),
    "norm-like": _corrected(norm_like_conv2d, _norm_like_rows, gain=False),
    "norm-like-gain": _corrected(norm_like_conv2d, _norm_like_rows, gain=True),
    "affine-like": _corrected(affine_like_conv2d, _affine_like_rows, gain=False),
    "affine-like-gain": _corrected(affine_like_conv2d, _affine_like_rows, gain=True),
}
