# Where a convolution's windows lie: kernel, stride, padding, dilation and groups, checked, for both directions.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from affine_divergence.functional._rows import differentiable
from affine_divergence.functional._windows import window_spread, window_sums

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """One number per axis. `extra` is padding behind the input beyond `padding`: an even kernel with padding "same" needs it."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    extra: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool = False

    def padded(self, x: Tensor) -> tuple[Tensor, Geometry]:
        """The input with the extra padding, and the geometry without."""
        if not any(self.extra):
            return x, self
        x = F.pad(x, [end for e in reversed(self.extra) for end in (0, e)])
        return x, replace(self, extra=(0,) * len(self.extra))

    def output_size(self, size: Sequence[int]) -> list[int]:
        """The size of the output of an input of this size."""
        axes = zip(size, self.kernel_size, self.stride, self.padding, self.dilation, self.extra, self.output_padding, strict=True)
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + 1 + o for n, k, s, p, d, _, o in axes]
        return [(n + 2 * p + e - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, e, _ in axes]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The plain convolution."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def convolve_backward(
        self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of the plain convolution for x, weight and bias, those that are needed."""
        if not any(needed):
            return None, None, None
        options = self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        x_grad, weight_grad, bias_grad = torch.ops.aten.convolution_backward(g, x, weight, [g.shape[1]], *options, needed)
        return x_grad, weight_grad, bias_grad

    def patch_sums(self, map_: Tensor) -> Tensor:
        """(N, groups, *size) → (N, groups, *output size): the sum over the inputs that reach each output."""
        size = self.output_size(map_.shape[2:])
        if _many_groups(map_) and not any(self.extra):
            return self.convolve(map_, map_.new_ones(self.groups, 1, *self.kernel_size), None)
        function = window_spread if self.transposed else window_sums
        return function(map_, self.kernel_size, self.stride, self.dilation, self.padding, size)

    def patch_spread(self, map_: Tensor, size: Sequence[int]) -> Tensor:
        """(N, groups, *output size) → (N, groups, *size), the adjoint of `patch_sums`."""
        if _many_groups(map_):
            rest = [n - m for n, m in zip(size, replace(self, transposed=True).output_size(map_.shape[2:]), strict=True)]
            adjoint = replace(self, transposed=not self.transposed, output_padding=(0,) * len(rest) if self.transposed else tuple(rest))
            return adjoint.convolve(map_, map_.new_ones(self.groups, 1, *self.kernel_size), None)
        function = window_sums if self.transposed else window_spread
        return function(map_, self.kernel_size, self.stride, self.dilation, self.padding, size)


def _many_groups(map_: Tensor) -> bool:
    # oneDNN convolves many channels, each with ones, in one pass: 1.2 ms at 32 × 128 × 28 × 28 channels_last and 3.3 contiguous, where
    # sums by axis take 12 out of the cache. Elsewhere they are exact (no TF32), differentiable and as fast or faster.
    return map_.shape[1] >= 16 and map_.dtype == torch.float32 and map_.device.type == "cpu" and not differentiable()


def conv_geometry(kernel_size: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    dims = len(kernel_size)
    stride, dilation, extra = _each("stride", stride, dims), _each("dilation", dilation, dims), (0,) * dims
    if padding == "valid":
        padding = (0,) * dims
    elif padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        padding, extra = tuple(t // 2 for t in total), tuple(t % 2 for t in total)
    return Geometry(tuple(kernel_size), stride, _each("padding", padding, dims), dilation, groups, extra, (0,) * dims)


def conv_transpose_geometry(
    kernel_size: Sequence[int], stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> Geometry:
    dims = len(kernel_size)
    stride, padding, dilation = _each("stride", stride, dims), _each("padding", padding, dims), _each("dilation", dilation, dims)
    output_padding = _each("output_padding", output_padding, dims)
    return Geometry(tuple(kernel_size), stride, padding, dilation, groups, (0,) * dims, output_padding, transposed=True)


def _each(name: str, value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)
