# Where a convolution's windows lie: kernel, stride, padding, dilation and groups, checked, for both directions.
from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from affine_divergence.functional._arguments import is_whole
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

    def check_size(self, size: Sequence[int]) -> None:
        """That an input of this size has an output."""
        if torch.compiler.is_compiling() or all(n > 0 for n in self.output_size(size)):  # torch checks what it compiles
            return
        if self.transposed:
            out = tuple(self.output_size(size))
            raise ValueError(f"padding {self.padding} takes all of the output: size {tuple(size)} would become {out}; pad less")
        padded = tuple(n + 2 * p + e for n, p, e in zip(size, self.padding, self.extra, strict=True))
        spans = tuple(d * (k - 1) + 1 for k, d in zip(self.kernel_size, self.dilation, strict=True))
        raise ValueError(f"the kernel reaches over {spans}, more than the padded input of size {padded}; pad more or take a smaller kernel")

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
        if self._many_groups(map_):
            return self.convolve(map_, map_.new_ones(self.groups, 1, *self.kernel_size), None)
        size = self.output_size(map_.shape[2:])
        function = window_spread if self.transposed else window_sums
        return function(map_, self.kernel_size, self.stride, self.dilation, self.padding, size)

    def patch_spread(self, map_: Tensor, size: Sequence[int]) -> Tensor:
        """(N, groups, *output size) → (N, groups, *size), the adjoint of `patch_sums`."""
        if self._many_groups(map_):
            adjoint = replace(self, transposed=not self.transposed, output_padding=(0,) * len(self.stride))
            rest = tuple(n - m for n, m in zip(size, adjoint.output_size(map_.shape[2:]), strict=True))
            if adjoint.transposed or not any(rest):
                return replace(adjoint, output_padding=rest).convolve(map_, map_.new_ones(self.groups, 1, *self.kernel_size), None)
        function = window_sums if self.transposed else window_spread
        return function(map_, self.kernel_size, self.stride, self.dilation, self.padding, size)

    def _many_groups(self, map_: Tensor) -> bool:
        # oneDNN convolves many channels, each with ones, in one pass: 1.2 ms at 32 × 128 × 28 × 28 channels_last and 3.3 contiguous, where
        # sums by axis take 12. Elsewhere those are as fast or faster, do not round to TF32 and can be differentiated.
        plain = map_.dtype == torch.float32 and map_.device.type == "cpu" and not any(self.extra)
        return plain and self.groups >= 16 and not differentiable()


def conv_geometry(kernel_size: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    """The geometry from the arguments of `F.conv2d` and its kin."""
    kernel_size = tuple(map(operator.index, kernel_size))
    dims = len(kernel_size)
    stride, dilation, extra = whole_numbers("stride", stride, dims, 1), whole_numbers("dilation", dilation, dims, 1), (0,) * dims
    if isinstance(padding, str):
        padding, extra = _named(padding, kernel_size, stride, dilation)
    return Geometry(kernel_size, stride, whole_numbers("padding", padding, dims, 0), dilation, groups, extra, (0,) * dims)


def conv_transpose_geometry(
    kernel_size: Sequence[int], stride: Any, padding: Any, output_padding: Any, groups: int, dilation: Any
) -> Geometry:
    """The geometry from the arguments of `F.conv_transpose2d` and its kin."""
    kernel_size = tuple(map(operator.index, kernel_size))
    dims = len(kernel_size)
    stride, dilation = whole_numbers("stride", stride, dims, 1), whole_numbers("dilation", dilation, dims, 1)
    padding = whole_numbers("padding", padding, dims, 0)
    output_padding = whole_numbers("output_padding", output_padding, dims, 0)
    if any(o >= max(s, d) for o, s, d in zip(output_padding, stride, dilation, strict=True)):
        raise ValueError(f"output_padding {output_padding} must be smaller than stride {stride} or dilation {dilation} on every axis")
    return Geometry(kernel_size, stride, padding, dilation, groups, (0,) * dims, output_padding, transposed=True)


def _named(
    padding: str, kernel_size: Sequence[int], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding on both sides, and the extra behind."""
    if padding not in ("same", "valid"):
        raise ValueError(f'padding must be whole numbers, "same" or "valid", got {padding!r}')
    if padding == "valid":
        return (0,) * len(kernel_size), (0,) * len(kernel_size)
    if any(s != 1 for s in stride):
        raise ValueError(f'padding "same" needs a stride of 1, got {stride}; with a stride there is no same size: give numbers')
    total = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
    return tuple(t // 2 for t in total), tuple(t % 2 for t in total)


def whole_numbers(name: str, value: Any, dims: int, least: int) -> tuple[int, ...]:
    """One number for each of dims axes, from one or from as many."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(is_whole(v) for v in values):
        raise TypeError(f"{name} must be a whole number or {dims} of them, got {value!r}")
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{name} must be one number or {dims}, one for each axis, got {value!r}")
    if any(v < least for v in values):
        raise ValueError(f"{name} must be {least} or more, got {value!r}")
    return tuple(map(operator.index, values))  # which torch.compile, if it took them for variables, then takes for constants
