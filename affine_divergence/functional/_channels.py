# Sums over the channels of each group, and factors per position and group: where a map (N, groups, *size) meets an image.
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from affine_divergence.functional._in_place import as_base, may_overwrite
from affine_divergence.functional._rows import differentiable, wide_dtype

if TYPE_CHECKING:
    from torch import Tensor

_PART = 2**19  # elements: what a part writes it reads back from the cache


def channel_sqnorm(x: Tensor, groups: int) -> Tensor:
    """(N, channels, *size) → (N, groups, *size): Σ x² over the channels of each group, float32 or wider."""
    grouped = by_group(x, groups)
    if grouped.shape[2] >= 8 and grouped.stride(2) == 1 and not differentiable():
        # One pass without a temporary: 1.2 ms against 3.6 in parts at 32 × 64 × 56 × 56 channels_last.
        norm: Tensor = torch.linalg.vector_norm(grouped, dim=2, dtype=wide_dtype(x.dtype))
        return norm.square()
    return channel_dot(x, x, groups)


def channel_dot(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """(N, channels, *size) twice → (N, groups, *size): Σ a·b over the channels of each group, float32 or wider."""
    if groups == a.shape[1]:
        dtype = wide_dtype(a.dtype)
        return a.to(dtype) * b.to(dtype)
    a, b = by_group(a, groups), by_group(b, groups)
    if at_once(a):
        return _dot(a, b)
    lines = max(1, _PART * a.shape[3] // a.numel())
    return torch.cat([_dot(*part) for part in zip(a.split(lines, 3), b.split(lines, 3), strict=True)], 2)


def scale_channels(y: Tensor, t: Tensor, shift: Tensor | None = None) -> Tensor:
    """The product of y (N, channels, *size) and t (N, groups, *size), plus shift (channels) if there is one."""
    groups = t.shape[1]
    if groups not in (1, y.shape[1]):
        grouped = scale_channels(by_group(y, groups), t.unsqueeze(2), None if shift is None else shift.view(groups, -1))
        # The reshape copies if the gradient was expanded, in channels_last: no view of the product is then the ungrouped one.
        return as_base(grouped.reshape(y.shape))
    return y * t if shift is None else torch.addcmul(shift.view(*shift.shape, *[1] * (y.dim() - shift.dim() - 1)), y, t)


def subtract_scaled(y: Tensor, x: Tensor, m: Tensor) -> Tensor:
    """The difference y − x·m, written into y if nobody else can hold it; y and x (N, channels, *size), m (N, groups, *size)."""
    shape, groups = y.shape, m.shape[1]
    if groups not in (1, shape[1]):
        y, x, m = by_group(y, groups), by_group(x, groups), m.unsqueeze(2)
    difference = y.sub_(x * m) if may_overwrite() else y - x * m  # not addcmul_, which vmap cannot batch
    return difference.reshape(shape)


def parts(*images: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few images (N, channels, *size) of each, so that what is made of them on the way stays in the cache.

    At 32 × 64 × 56 × 56 the products a·b of all images take 10 ms to write and add up, in parts 3.3.
    """
    if at_once(images[0]):
        yield images
        return
    number = max(1, _PART // images[0][:1].numel())
    yield from zip(*(i.split(number) for i in images), strict=True)


def at_once(image: Tensor) -> bool:
    """Whether there is nothing to gain from parts: a small image, or a device that pays for each operation and not for its memory."""
    return differentiable() or image.device.type != "cpu" or image.numel() <= _PART


def by_group(x: Tensor, groups: int) -> Tensor:
    """(N, channels, *size) → (N, groups, channels of one, *size)."""
    return x.view(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])  # not unflatten, which is_grads_batched cannot batch


def _dot(a: Tensor, b: Tensor) -> Tensor:
    dtype = wide_dtype(a.dtype)
    a, b = a.to(dtype), b.to(dtype)
    if 0 < a.shape[2] <= 4:  # a sum over the innermost of three takes ten times as long as over all
        total = a[:, :, 0] * b[:, :, 0]
        for channel in range(1, a.shape[2]):
            total = torch.addcmul(total, a[:, :, channel], b[:, :, channel])
        return total
    return (a * b).sum(2)
