# Patch-normalised convolutions, each with its definition and options: generated tables that the tests run over.
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import conv_oracles
import pytest
import torch
from torch import Tensor

import affine_divergence.functional as AF

FUNCTIONS: dict[tuple[str, bool, int], Callable[..., Tensor]] = {
    (kind, transposed, dims): getattr(AF, f"{kind.replace('-', '_')}_conv{'_transpose' * transposed}{dims}d")
    for kind, transposed, dims in product(("affine-like", "norm-like"), (False, True), (1, 2, 3))
}


@dataclass(frozen=True)
class ConvMap:
    kind: str
    dims: int
    transposed: bool = False
    kernel: tuple[int, ...] = ()
    channels: tuple[int, int] = (4, 4)
    bias: bool = True
    geometry: dict[str, Any] = field(default_factory=dict)
    options: dict[str, float] = field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Tensor]:
        return FUNCTIONS[self.kind, self.transposed, self.dims]

    @property
    def groups(self) -> int:
        groups: int = self.geometry.get("groups", 1)
        return groups

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.function(x, weight, bias, **self.geometry, **self.options)

    def patches(self, x: Tensor, mode: str = "zeros") -> Tensor:
        """x (N, C_in, *size) → (N, C_in, taps, *out), written out."""
        stride, dilation = self._each("stride", 1), self._each("dilation", 1)
        padding = self.geometry.get("padding", 0)
        padding = padding if isinstance(padding, str) else self._each("padding", 0)
        if self.transposed:
            return conv_oracles.conv_transpose_patches(x, self.kernel, stride, padding, self._each("output_padding", 0), dilation)
        return conv_oracles.conv_patches(x, self.kernel, stride, padding, dilation, mode)

    def expected(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, mode: str = "zeros") -> Tensor:
        batched = x.dim() == self.dims + 2
        patches = self.patches(x if batched else x.unsqueeze(0), mode)
        oracle = conv_oracles.affine_like if self.kind == "affine-like" else conv_oracles.norm_like
        z = oracle(patches, weight, bias, self.groups, transposed=self.transposed, **self.options)
        return z if batched else z.squeeze(0)

    def tensors(self, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Any]:
        """x ([N,] C_in, *size) of shape ([N,] *size), weight and bias (or None) as leaves that want gradients."""
        generator = torch.Generator().manual_seed(seed)
        c_in, c_out = self.channels
        first = (c_in, c_out // self.groups) if self.transposed else (c_out, c_in // self.groups)
        shapes = [(*shape[: -self.dims], c_in, *shape[-self.dims :]), (*first, *self.kernel), (c_out,)]
        drawn: list[Any] = [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]
        return drawn if self.bias else [*drawn[:2], None]

    def _each(self, name: str, default: int) -> tuple[int, ...]:
        value = self.geometry.get(name, default)
        return (value,) * self.dims if isinstance(value, int) else tuple(value)

    def __str__(self) -> str:
        named = {**self.geometry, **self.options}
        parts = [self.kind, f"{'transposed-' * self.transposed}{self.dims}d", "bias" if self.bias else "no-bias"]
        return "-".join([*parts, *(f"{name}={value}".replace(" ", "") for name, value in named.items())])


OPTIONS: list[tuple[str, bool, dict[str, float]]] = [
    (kind, bias, options)
    for kind, choices in {
        "affine-like": [{}, {"gain": 1.7}],
        "norm-like": [{}, {"gain": 1.7}, {"eps": 0.0, "gain": 0.6}, {"eps": 0.3}],
    }.items()
    for bias in (True, False)
    for options in choices  # type: ignore[attr-defined]
]
"""Form, bias, gain and ε: every combination."""

KERNELS = {1: (4,), 2: (3, 2), 3: (2, 1, 3)}
SIZES = {1: (9,), 2: (6, 7), 3: (4, 3, 5)}
CHANNELS = {1: (3, 2), 2: (4, 6), 4: (4, 8)}  # by groups; the last is depthwise, two outputs for each input


def _uneven(dims: int, *values: int) -> tuple[int, ...]:
    return tuple(values[i % len(values)] for i in range(dims))


def _conv_geometries(dims: int) -> Iterator[dict[str, Any]]:
    strides = (1, 2, _uneven(dims, 2, 1, 3))
    paddings = (0, 1, _uneven(dims, 2, 0, 1), "same", "valid")
    dilations = (1, _uneven(dims, 2, 1))
    for stride, padding, dilation, groups in product(strides, paddings, dilations, CHANNELS):
        if padding != "same" or stride == 1:
            yield {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}


def _conv_transpose_geometries(dims: int) -> Iterator[dict[str, Any]]:
    strides = (1, 2, _uneven(dims, 3, 1, 2))
    paddings = (0, 1, _uneven(dims, 2, 0, 1))
    dilations = (1, _uneven(dims, 1, 2))
    for stride, padding, output_padding, groups, dilation in product(strides, paddings, (0, 1, _uneven(dims, 1, 0)), CHANNELS, dilations):
        geometry = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups, "dilation": dilation}
        each = ConvMap("", dims, geometry=geometry)._each
        if all(o < max(s, d) for o, s, d in zip(each("output_padding", 0), each("stride", 1), each("dilation", 1), strict=True)):
            yield geometry


def _table() -> Iterator[ConvMap]:
    """Every geometry, each with two of the twelve options, drawn; with this seed all pairs of choices occur."""
    draw = random.Random(8)
    for dims, transposed in product((1, 2, 3), (False, True)):
        for geometry in _conv_transpose_geometries(dims) if transposed else _conv_geometries(dims):
            for kind, bias, options in draw.sample(OPTIONS, 2):
                yield ConvMap(kind, dims, transposed, KERNELS[dims], CHANNELS[geometry["groups"]], bias, geometry, options)


TABLE = list(_table())

_BASES = [
    ConvMap("", 1, False, (3,), (2, 3), geometry={"padding": 2, "dilation": 2}),
    ConvMap("", 2, False, (3, 2), (2, 4), geometry={"stride": (2, 1), "padding": (1, 0), "groups": 2}),
    ConvMap("", 3, False, (1, 2, 2), (2, 2), geometry={"groups": 2}),
    ConvMap("", 2, True, (2, 2), (4, 2), geometry={"stride": (1, 2), "padding": (0, 1), "output_padding": (0, 1), "groups": 2}),
]
EVERY = [replace(base, kind=kind, bias=bias, options=options) for base in _BASES for kind, bias, options in OPTIONS]
PLAIN = [m for m in EVERY if not m.options]

every_map = pytest.mark.parametrize("map_", EVERY, ids=str)
"""One geometry for each number of axes and a transposed one, over form, bias, gain and ε."""

every_kind = pytest.mark.parametrize("map_", PLAIN, ids=str)
"""The same at the default gain and ε: for slow tests."""
