# The measures of one call: sums over each row's output, then what is said of all rows (docs/maths.md, section 5).
#
# Layout: δz_i, g_i the change of row i and ∂L/∂z_i; p_i = Σ_j G_ij g_j, by which plain gradient descent would move it, times −lr. A row sum
# is one float64 number for each row, flattened. δZ and P are made a part at a time, their sums a block at a time, so that neither lies in
# memory whole and what a product writes is read back from the cache.
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._maps import AffineMap, Pair
from affine_divergence.diagnostics._quantiles import quantiles
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

_PART = 2**20  # elements of z, of a product with the parameters
_BLOCK = 2**15  # of a sum
SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Rows:
    """The captured rows of one call, in the dtype of the products."""

    map: AffineMap
    x: Tensor
    g: Tensor  # as the map's output, not its vectors
    axes: tuple[int, ...]

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and vectors of g, a few rows or images at a time."""
        size = _number(self.g, _PART)
        for x, g in zip(self.x.split(size), self.g.split(size), strict=True):
            yield x, self.map.vectors(g)

    def gradients(self, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        """What these rows add to the gradients."""
        return self.map.gradients(self.x, self.map.vectors(self.g), weight, needed)


class Moved(NamedTuple):
    """Row sums of a change: ⟨δz_i, g_i⟩ and ‖δz_i‖²."""

    dot: Tensor
    square: Tensor

    def times(self, factor: float) -> Moved:
        """Of the change times a factor."""
        return Moved(factor * self.dot, factor**2 * self.square)


@dataclass(frozen=True)
class RowSums:
    """What is needed of each row."""

    gg: Tensor  # ‖g_i‖²
    used: Tensor  # g_i is not exactly 0, and the parameters reach row i
    own: Tensor  # G_ii
    moved: tuple[Moved, ...]  # of each change
    pull: Moved | None  # of p
    others: Tensor | None  # ‖p_i − G_ii g_i‖


@dataclass(frozen=True)
class Summary:
    """The measures of one change, as 0-dimensional tensors in float64."""

    multiplier_p5: Tensor
    multiplier_median: Tensor
    multiplier_p95: Tensor
    multiplier_mean: Tensor
    multiplier_cv: Tensor
    alignment_median: Tensor
    below_zero: Tensor
    efficiency: Tensor


SUMMARY = tuple(field.name for field in fields(Summary))


def row_sums(rows: Rows, changes: list[Pair], needed: tuple[bool, bool], gradient: Pair | None) -> RowSums:
    """Of each change of weight and bias; of p by the gradient of both, where that is given."""
    axis, dtype = rows.map.axis, solve_dtype(rows.g.device)
    columns: list[list[Tensor]] = []
    for x, g in rows.parts():
        own = rows.map.self_term(x, g, needed).to(dtype)
        movable = rows.map.movable(x)
        products = [rows.map.product(x, *change) for change in (*changes, *([gradient] if gradient is not None else []))]
        size = _number(g, _BLOCK)
        blocks = zip(*(t.split(size) for t in (g, own, *products)), strict=True)
        sums = [_sums(*block, axis=axis, dtype=dtype) for block in blocks]
        joined = [torch.cat([s.flatten() for s in column]) for column in zip(*sums, strict=True)]
        used = joined[0] != 0
        columns.append([used if movable is None else used & movable, own.flatten(), *joined[1:]])
    used, own, gg, *pairs, others = (torch.cat(column) for column in zip(*columns, strict=True))
    moved = [Moved(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
    pull = moved.pop() if gradient is not None else None
    return RowSums(gg, used, own, tuple(moved), pull, None if pull is None else others)


def _sums(g: Tensor, own: Tensor, *products: Tensor, axis: int, dtype: torch.dtype) -> list[Tensor]:
    """Whether g is not 0, ‖g‖², dot and square of each product, and the length of the last one without its own part."""
    exact = g.dtype == dtype
    g = g.to(dtype)
    gg = (g * g).sum(axis)
    sums = [(g != 0).any(axis) if exact else gg, gg]  # of float32 no square vanishes in float64
    for product in products:
        product = product.to(dtype)
        sums += [(product * g).sum(axis), (product * product).sum(axis)]
    if exact:
        rest = product - own.unsqueeze(axis) * g
        others = (rest * rest).sum(axis)
    else:  # three sums that are there: they lose less than a product in float32 has lost
        others = (sums[-1] - 2 * own * sums[-2] + own.square() * gg).clamp(min=0.0)
    return [*sums, others.sqrt()]


def multipliers(sums: RowSums, moved: Moved, lr: float) -> Tensor:
    """−⟨δz_i, g_i⟩/(lr ‖g_i‖²) of each row."""
    return -moved.dot / (lr * sums.gg)


def alignments(sums: RowSums, moved: Moved) -> Tensor:
    """cos(δz_i, −g_i) of each row; 0 where nothing moves."""
    cosine = -moved.dot / (moved.square.sqrt() * sums.gg.sqrt())
    return torch.where(moved.square == 0, 0.0, cosine.clamp(-1.0, 1.0))


def summary(sums: RowSums, moved: Moved, lr: float) -> Summary:
    """Of all rows that are not masked."""
    used = sums.used
    number = used.sum()
    m = multipliers(sums, moved, lr)
    mean = torch.where(used, m, 0.0).sum() / number
    deviation = (torch.where(used, (m - mean).square(), 0.0).sum() / number).sqrt()
    dot, square, gg = (torch.where(used, t, 0.0).sum() for t in (moved.dot, moved.square, sums.gg))
    low, median, high = quantiles(m, used, SHARES)
    return Summary(
        multiplier_p5=low,
        multiplier_median=median,
        multiplier_p95=high,
        multiplier_mean=mean,
        multiplier_cv=deviation / mean.abs(),
        alignment_median=quantiles(alignments(sums, moved), used, (0.5,))[0],
        below_zero=(used & (moved.dot > 0)).sum().to(dot.dtype) / number,
        efficiency=dot / (square.sqrt() * gg.sqrt()),
    )


def interference(sums: RowSums) -> Tensor:
    """Σ_i ‖g_i‖·‖Σ_{j≠i} G_ij g_j‖ / Σ_i G_ii ‖g_i‖²; NaN where p is not known."""
    if sums.others is None:
        return torch.full_like(sums.gg.sum(), torch.nan)
    above = torch.where(sums.used, sums.gg.sqrt() * sums.others, 0.0).sum()
    return above / torch.where(sums.used, sums.own * sums.gg, 0.0).sum()


def _number(t: Tensor, elements: int) -> int:
    """How many rows or images have so many elements."""
    return max(1, elements // max(1, t[:1].numel()))
