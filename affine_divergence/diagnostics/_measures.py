# The measures of one call: sums over each row's output, then what is said of all rows (docs/maths.md, section 5).
#
# Layout: δz_i, g_i the change of row i and ∂L/∂z_i. A row sum is one float64 number for each row, flattened. Sums are made of few rows at a
# time, so that neither δZ nor its products ever lie in memory whole.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._maps import AffineMap, Pair, floating
from affine_divergence.diagnostics._quantiles import quantiles
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

_PART = 2**18  # elements of z at a time: what a product writes is read back from the cache
SHARES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Rows:
    """The captured rows of one call, in the dtype of the products."""

    map: AffineMap
    x: Tensor
    g: Tensor  # as the map's output, not its vectors
    axes: tuple[int, ...]

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and vectors of g, a few rows or images at a time."""
        per_row = self.g[:1].numel()
        size = max(1, _PART // max(1, per_row))
        return [(x, self.map.vectors(g)) for x, g in zip(self.x.split(size), self.g.split(size), strict=True)]

    def gradients(self, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        """What these rows add to the plain gradients."""
        return self.map.gradients(self.x, self.map.vectors(self.g), weight, needed)


class Moved(NamedTuple):
    """Row sums of a change: ⟨δz_i, g_i⟩ and ‖δz_i‖²."""

    dot: Tensor
    square: Tensor


@dataclass(frozen=True)
class RowSums:
    """What is needed of each row."""

    gg: Tensor  # ‖g_i‖²
    used: Tensor  # g_i is not exactly 0, and the layer can move row i
    own: Tensor  # G_ii
    others: Tensor | None  # ‖Σ_{j≠i} G_ij g_j‖
    moved: tuple[Moved, ...]  # of each change


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


def row_sums(rows: Rows, changes: Sequence[Pair], needed: tuple[bool, bool], gradient: Pair | None) -> RowSums:
    """Of each change of the parameters; what the other rows do, by the gradient where that is given."""
    parts: list[list[Tensor]] = []
    for x, g in rows.parts():
        wide = g.to(solve_dtype(g.device))
        used, movable = (wide != 0).any(rows.map.axis), rows.map.movable(x)
        own = rows.map.self_term(x, g, needed).to(wide.dtype)
        sums = [_sum(wide, wide, rows.map.axis), (used if movable is None else used & movable).to(wide.dtype), own]
        if gradient is not None:
            others = rows.map.product(x, *gradient).to(wide.dtype) - own.unsqueeze(rows.map.axis) * wide
            sums.append(_sum(others, others, rows.map.axis).sqrt())
        for change in changes:
            if change == (None, None):
                sums += [torch.zeros_like(sums[0])] * 2
                continue
            delta = rows.map.product(x, *change).to(wide.dtype)
            sums += [_sum(delta, wide, rows.map.axis), _sum(delta, delta, rows.map.axis)]
        parts.append([s.flatten() for s in sums])
    joined = [torch.cat(column) for column in zip(*parts, strict=True)]
    gg, used, own = joined[:3]
    others, rest = (joined[3], joined[4:]) if gradient is not None else (None, joined[3:])
    return RowSums(gg, used != 0, own, others, tuple(Moved(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)))


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
    return Summary(
        *quantiles(m, used, SHARES),
        multiplier_mean=mean,
        multiplier_cv=deviation / mean.abs(),
        alignment_median=quantiles(alignments(sums, moved), used, (0.5,))[0],
        below_zero=(used & (moved.dot > 0)).sum() / number,
        efficiency=dot / (square.sqrt() * gg.sqrt()),
    )


def interference(sums: RowSums) -> Tensor:
    """Σ_i ‖g_i‖·‖Σ_{j≠i} G_ij g_j‖ / Σ_i G_ii ‖g_i‖²."""
    assert sums.others is not None
    above = torch.where(sums.used, sums.gg.sqrt() * sums.others, 0.0).sum()
    return above / torch.where(sums.used, sums.own * sums.gg, 0.0).sum()


def _sum(a: Tensor, b: Tensor, axis: int) -> Tensor:
    return (a * b).sum(axis)
