# Patch by patch in float64: what a convolution reads at every output position, written out, and the two maps of it.
from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from oracles import FLOAT32_EPS
from torch import Tensor

Numbers = Sequence[int]


def index(size: int, before: int, after: int, mode: str) -> list[int | None]:
    """The position that each padded position of an axis shows; None is a zero."""
    positions = range(-before, size + after)
    if mode == "zeros":
        return [p if 0 <= p < size else None for p in positions]
    if mode == "circular":
        return [p % size for p in positions]
    if mode == "replicate":
        return [min(max(p, 0), size - 1) for p in positions]
    mirrored = [-p if p < 0 else p for p in positions]  # reflect
    return [2 * (size - 1) - p if p >= size else p for p in mirrored]


def padded(x: Tensor, before: Numbers, after: Numbers, mode: str = "zeros") -> Tensor:
    """x (N, C, *size), each axis with positions before and after it."""
    for axis, (b, a) in enumerate(zip(before, after, strict=True), start=2):
        shown = index(x.shape[axis], b, a, mode)
        slices = [0 * x.select(axis, 0) if s is None else x.select(axis, s) for s in shown]
        x = torch.stack(slices, axis)
    return x


def conv_patches(
    x: Tensor, kernel: Numbers, stride: Numbers, padding: Numbers | str, dilation: Numbers, mode: str = "zeros"
) -> Tensor:
    """x (N, C, *size) → (N, C, taps, *out): what each tap of the kernel meets at each output position."""
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "same":
        before = [span // 2 for span in spans]
        after = [span - b for span, b in zip(spans, before, strict=True)]
    else:
        before = after = [0] * len(kernel) if padding == "valid" else list(padding)  # type: ignore[arg-type]
    x = padded(x.double(), before, after, mode)
    out = [(n - span - 1) // s + 1 for n, span, s in zip(x.shape[2:], spans, stride, strict=True)]
    taps = []
    for tap in product(*map(range, kernel)):
        met = x
        for axis, (t, d, s, o) in enumerate(zip(tap, dilation, stride, out, strict=True), start=2):
            met = met.index_select(axis, torch.tensor([t * d + s * i for i in range(o)], dtype=torch.long))
        taps.append(met)
    return torch.stack(taps, 2)


def conv_transpose_patches(
    x: Tensor, kernel: Numbers, stride: Numbers, padding: Numbers, output_padding: Numbers, dilation: Numbers
) -> Tensor:
    """x (N, C, *size) → (N, C, taps, *out): the input that reaches each output position by each tap, zero where none does."""
    x = x.double()
    taps = []
    for tap in product(*map(range, kernel)):
        met = x
        for axis, (t, k, s, p, o, d) in enumerate(zip(tap, kernel, stride, padding, output_padding, dilation, strict=True), start=2):
            size = met.shape[axis]
            out = (size - 1) * s - 2 * p + d * (k - 1) + 1 + o
            reaching = {i * s + t * d - p: i for i in range(size)}
            met = torch.stack([met.select(axis, reaching[j]) if j in reaching else 0 * met.select(axis, 0) for j in range(out)], axis)
        taps.append(met)
    return torch.stack(taps, 2)


def vectors(patches: Tensor, groups: int) -> Tensor:
    """(N, C, taps, *out) → (N, groups, positions, C/groups·taps): a row for each patch of a group."""
    return patches.unflatten(1, (groups, -1)).flatten(4).movedim(4, 2).flatten(3)


def matrices(weight: Tensor, groups: int, *, transposed: bool) -> Tensor:
    """The weight of each group, (groups, C_out/groups, C_in/groups·taps)."""
    weight = weight.double().flatten(2).unflatten(0, (groups, -1))
    return (weight.transpose(1, 2) if transposed else weight).flatten(2)


def affine_like(
    patches: Tensor, weight: Tensor, bias: Tensor | None, groups: int, *, transposed: bool = False, gain: float = 1.0
) -> Tensor:
    """Patch by patch: gain · (W p + b)/√(p·p + 1)."""
    rows, w = vectors(patches, groups), matrices(weight, groups, transposed=transposed)
    z = rows @ w.mT + _by_group(bias, w)
    return _as_images(gain * z / ((rows * rows).sum(-1, keepdim=True) + 1).sqrt(), patches)


def norm_like(
    patches: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    *,
    transposed: bool = False,
    gain: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """Patch by patch: gain · (W p/√(p·p + ε) + b); at ε = 0 a patch of zeros is gain · b, whatever happens to x."""
    rows, w = vectors(patches, groups), matrices(weight, groups, transposed=transposed)
    sqnorm = (rows * rows).sum(-1, keepdim=True) + (FLOAT32_EPS if eps is None else eps)
    unit = torch.where(sqnorm == 0, 0 * rows, rows / torch.where(sqnorm == 0, torch.ones_like(sqnorm), sqnorm).sqrt())
    return _as_images(gain * (unit @ w.mT + _by_group(bias, w)), patches)


def _by_group(bias: Tensor | None, weight: Tensor) -> Tensor:
    if bias is None:
        return torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    return bias.double().reshape(1, weight.shape[0], 1, -1)


def _as_images(z: Tensor, patches: Tensor) -> Tensor:
    """(N, groups, positions, C_out/groups) → (N, C_out, *out)."""
    return z.transpose(2, 3).flatten(1, 2).unflatten(2, patches.shape[3:])
