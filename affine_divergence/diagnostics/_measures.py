# The measures of one call: sums over each row's output, then what is said of all rows (docs/maths.md, section 5).
#
# Layout: δz_i, g_i the change of row i and ∂L/∂z_i; p_i = Σ_j G_ij g_j, by which plain gradient descent would move it, times −lr. A row sum
# is one float64 number for each row, flattened. δZ and P are made a part at a time, so that neither lies in memory whole.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._maps import AffineMap, Pair
from affine_divergence.diagnostics._quantiles import quantiles
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

_PART, _IMAGES_PART = 2**18, 2**19  # elements of z of one product; a convolution lays out its weights anew in each
_BLOCK = 2**16  # of a sum in float64
_SMALL, _LARGE = 1e-30, 1e36  # between which sums of squares are right in float32
SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Rows:
    """The captured rows of one call, in the dtype of the products."""

    map: AffineMap
    x: Tensor
    g: Tensor  # as the map's output, not its vectors
    axes: tuple[int, ...]  # the shape of the rows, as what the module was given has them
    swapped: bool = False  # these rows have both axes the other way round

    def in_axes(self, numbers: Tensor) -> Tensor:
        """One number of each row, in the order of the axes."""
        return numbers.view(self.axes[::-1]).mT.flatten() if self.swapped else numbers

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and vectors of g, a few rows or images at a time."""
        size = _number(self.g, _PART if self.map.axis == -1 else _IMAGES_PART)
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
    products = [*changes, gradient] if gradient is not None else changes
    columns = [_part(rows.map, x, g, products, needed, pull=gradient is not None) for x, g in rows.parts()]
    used, own, gg, *rest = (torch.cat(column) for column in zip(*columns, strict=True))
    others = rest.pop() if gradient is not None else None
    moved = [Moved(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    pull = moved.pop() if gradient is not None else None
    return RowSums(gg, used, own, tuple(moved), pull, others)


def _part(map_: AffineMap, x: Tensor, g: Tensor, changes: Sequence[Pair], needed: tuple[bool, bool], *, pull: bool) -> list[Tensor]:
    """Of a few rows or images: used, G_ii, ‖g‖², dot and square of each change, with pull the length of the last without its own part."""
    wide = solve_dtype(g.device)
    own = map_.self_term(x, g, needed)
    tensors = [g, own, *(map_.product(x, *change) for change in changes)]
    sums = _quick(tensors, map_.axis, pull=pull)
    if sums is None:
        blocks = zip(*(t.split(_number(g, _BLOCK)) for t in tensors), strict=True)
        columns = zip(*(_exact(block, map_.axis, wide, pull=pull) for block in blocks), strict=True)
        sums = [torch.cat(column) for column in columns]
    used, *joined = (s.flatten().to(wide) for s in sums)
    movable = map_.movable(x)
    return [used != 0 if movable is None else (used != 0) & movable.flatten(), own.to(wide).flatten(), *joined]


def _quick(block: Sequence[Tensor], axis: int, *, pull: bool) -> list[Tensor] | None:
    """In float32, on a CPU, where no square comes near its limits; else None."""
    # 6 ms of 64 × 32 × 32 × 32 where float64 takes 15. On a GPU it would wait for the answer, and gain little.
    if block[0].dtype != torch.float32 or block[0].device.type != "cpu":
        return None
    sums = _sums(block, axis, pull, torch.empty_like(block[0]))
    squares = torch.stack([sums[0], *sums[2::2]])
    if not bool((squares < _LARGE).all()):
        return None
    small = squares < _SMALL
    # A square of 0 is one that vanished, unless what it is of is 0 itself.
    vectors = block[0], *block[2:]
    if bool(small.any()) and any(bool(t.movedim(axis, -1)[few].any()) for t, few in zip(vectors, small, strict=True)):
        return None
    return [sums[0], *sums]


def _exact(block: Sequence[Tensor], axis: int, dtype: torch.dtype, *, pull: bool) -> list[Tensor]:
    """In float64, in which no product of float32 numbers vanishes."""
    wide = [t.to(dtype) for t in block]
    return [(wide[0] != 0).any(axis).to(dtype), *_sums(wide, axis, pull, torch.empty_like(wide[0]))]


def _sums(block: Sequence[Tensor], axis: int, pull: bool, space: Tensor) -> list[Tensor]:
    """‖g‖², dot and square of each product; with pull the length of the last one without its own part."""
    # In memory that is there: a new tensor for each result costs more than the result.
    g, own, *products = block
    sums = [torch.mul(g, g, out=space).sum(axis)]
    for product in products:
        sums += [torch.mul(product, g, out=space).sum(axis), torch.mul(product, product, out=space).sum(axis)]
    if pull:
        torch.sub(products[-1], torch.mul(own.unsqueeze(axis), g, out=space), out=space)
        sums.append(torch.mul(space, space, out=space).sum(axis).sqrt_())
    return sums


def multipliers(sums: RowSums, moved: Moved, lr: float) -> Tensor:
    """−⟨δz_i, g_i⟩/(lr ‖g_i‖²) of each row."""
    return _multipliers(sums.gg, moved, lr)


def alignments(sums: RowSums, moved: Moved) -> Tensor:
    """cos(δz_i, −g_i) of each row; 0 where nothing moves."""
    return _alignments(sums.gg, moved)


def summary(sums: RowSums, moved: Moved, lr: float) -> Summary:
    """Of all rows that are not masked."""
    gg, moved, used = _without_masked(sums, moved)
    m = _multipliers(gg, moved, lr)
    low, median, high = quantiles(m, used, SHARES)
    number = len(gg) if used is None else used.sum()
    mean = _sum_of(m, used) / number
    deviation = (_sum_of((m - mean).square_(), used) / number).sqrt()
    up, dot = moved.dot > 0, _sum_of(moved.dot, used)
    return Summary(
        multiplier_p5=low,
        multiplier_median=median,
        multiplier_p95=high,
        multiplier_mean=mean,
        multiplier_cv=deviation / mean.abs(),
        alignment_median=quantiles(_alignments(gg, moved), used, (0.5,))[0],
        # A row that is not finite, as then the sum, goes neither up nor down: of such rows the share is not known, and 0 would be ideal.
        below_zero=torch.where(dot.isfinite(), (up if used is None else up & used).sum().to(gg.dtype) / number, torch.nan),
        efficiency=efficiency(dot, _sum_of(moved.square, used), _sum_of(gg, used)),
    )


def efficiency(dot: Tensor, square: Tensor, gg: Tensor) -> Tensor:
    """Σ ⟨δz_i, g_i⟩ / (‖δZ‖ ‖g‖) of the sums over rows; NaN where nothing moves."""
    return (dot / (square.sqrt() * gg.sqrt())).clamp(-1.0, 1.0)  # in float32 that of one row came out as -1.0000000255


def _without_masked(sums: RowSums, moved: Moved) -> tuple[Tensor, Moved, Tensor | None]:
    """‖g_i‖², the row sums of the change, and which rows are used, None being all: on a CPU, where asking costs no wait."""
    if sums.gg.device.type != "cpu":
        return sums.gg, moved, sums.used
    if bool(sums.used.all()):
        return sums.gg, moved, None
    return sums.gg[sums.used], Moved(*(t[sums.used] for t in moved)), None


def _multipliers(gg: Tensor, moved: Moved, lr: float) -> Tensor:
    return moved.dot / (-lr * gg)


def _alignments(gg: Tensor, moved: Moved) -> Tensor:
    cosine = (moved.dot / moved.square.sqrt().mul_(gg.sqrt())).neg_().clamp_(-1.0, 1.0)
    return cosine.masked_fill_(moved.square == 0, 0.0)


def _sum_of(values: Tensor, used: Tensor | None) -> Tensor:
    return values.sum() if used is None else torch.where(used, values, 0.0).sum()


def interference(sums: RowSums) -> Tensor:
    """Σ_i ‖g_i‖·‖Σ_{j≠i} G_ij g_j‖ / Σ_i G_ii ‖g_i‖²; NaN where p is not known."""
    if sums.others is None:
        return torch.full_like(sums.gg.sum(), torch.nan)
    above = torch.where(sums.used, sums.gg.sqrt() * sums.others, 0.0).sum()
    return above / torch.where(sums.used, sums.own * sums.gg, 0.0).sum()


def _number(t: Tensor, elements: int) -> int:
    """How many rows or images have so many elements."""
    return max(1, elements // max(1, t[:1].numel()))
