# What each correction would do on the same rows: the table of every kind, and the loss after steps of one length.
#
# A kind is a map with its own gradients: the plain one (none), one whose rows are divided by G_ii (sample), the solution for all rows at
# once (batch), or the plain one scaled (affine-like, norm-like), for which g is held fixed.
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from affine_divergence.diagnostics._batch_rows import batch_gradients
from affine_divergence.diagnostics._change import Before, Parameter, norm
from affine_divergence.diagnostics._faults import reason_of
from affine_divergence.diagnostics._gradients import Gradients, inner_product, total
from affine_divergence.diagnostics._maps import AffineMap, ConvMap, EmbeddingMap, LinearMap, Pair, SampleMap, ScaledMap
from affine_divergence.diagnostics._measures import SUMMARY, interference, row_sums, summary
from affine_divergence.diagnostics._records import Counterfactual, Step
from affine_divergence.diagnostics._told import Told, families
from affine_divergence.diagnostics._transfer import transferred
from affine_divergence.functional._rows import DEFAULT_EPS
from affine_divergence.functional._scale import affine_like, norm_like

if TYPE_CHECKING:
    from torch import Tensor

DAMPING = 1e-3
"""Of the batch correction: that of its layers where none is given."""
KINDS = ("none", "affine-like", "norm-like", "sample", "batch")
_GRADIENT_ONLY = ("none", "sample", "batch")
_EXACT, _FIRST_ORDER = "exact", "first order, g held fixed"
_NOT_FINITE = "inputs or gradients are not finite"
_ONE_HOT = "rows of an embedding are one-hot: all of one norm already"


def counterfactuals(calls: Sequence[Told]) -> tuple[list[Counterfactual], dict[str, Gradients]]:
    """The table, and the gradients of the kinds that leave the forward alone."""
    table: list[Counterfactual] = []
    directions: dict[str, Gradients] = {}
    for kind in KINDS:
        maps = [_map(one, kind) for one in calls]
        ready = [replace(one, rows=replace(one.rows, map=map_)) for one, map_ in zip(calls, maps, strict=True) if not isinstance(map_, str)]
        gradients: Gradients = {}
        numbers: dict[int, list[Tensor]] = {}
        reasons = {id(one.rows.g): map_ for one, map_ in zip(calls, maps, strict=True) if isinstance(map_, str)}
        for family in families(ready):
            try:
                of_family, of_calls = _of_kind(family, kind)
            except Exception as error:
                reasons |= dict.fromkeys((id(one.rows.g) for one in family), reason_of(error))
            else:
                gradients |= of_family
                numbers |= zip([id(one.rows.g) for one in family], of_calls, strict=True)
        if kind in _GRADIENT_ONLY:
            directions[kind] = gradients
        found = dict(zip(numbers, transferred(list(numbers.values())), strict=True))
        table += [_line(kind, one, found.get(id(one.rows.g)), reasons.get(id(one.rows.g), "")) for one in calls]
    return table, directions


def _of_kind(family: Sequence[Told], kind: str) -> tuple[Gradients, list[list[Tensor]]]:
    """Of calls that share parameters, their gradients and the numbers of each call."""
    gradients = total(family, lambda one: _gradients(one, kind))
    return gradients, [_numbers(one, gradients, kind) for one in family]


def steps(
    directions: Mapping[str, Gradients],
    before: Before,
    gradients: Mapping[Parameter, Tensor],
    realised: Callable[[Mapping[Parameter, Tensor]], float],
) -> list[Step]:
    """The measured layers' parameters moved by the optimiser's change and, as far, along each direction; the others stay.

    A kind that some of the layers have no direction for moves the others alone.
    """
    changes = {"actual": {p: before.change(p) for p in directions["none"]}}
    length = _joint_norm(changes["actual"])
    for kind, direction in directions.items():
        if own := _joint_norm(direction):
            changes[kind] = {p: -length / own * t for p, t in direction.items()}  # the rows have the sign of what is minimised
    return [
        Step(kind=kind, norm=_joint_norm(change), predicted=inner(gradients, change.__getitem__, change), realised=realised(change))
        for kind, change in changes.items()
    ]


def inner(gradients: Mapping[Parameter, Tensor], change: Callable[[Parameter], Tensor], of: Iterable[Parameter]) -> float:
    """Σ ⟨∂L/∂θ, δθ⟩: to first order the change of the loss."""
    products = []
    for p in of:
        if p in gradients:
            gradient = gradients[p].to_dense() if gradients[p].is_sparse else gradients[p]
            products.append(inner_product(_real(gradient), _real(change(p))))
    return math.fsum(value for (value,) in transferred([[product] for product in products]))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _map(one: Told, kind: str) -> AffineMap | str:
    """The map of the kind, or why there is none."""
    map_ = one.rows.map
    if kind == "none":
        return map_
    if isinstance(map_, ScaledMap):
        return "its map is a corrected one already"
    if kind == "batch" or (kind == "sample" and isinstance(map_, EmbeddingMap)):
        return map_
    if not isinstance(map_, (LinearMap, ConvMap)):
        return _ONE_HOT
    if kind == "sample":
        return SampleMap(map_)
    return ScaledMap(map_, affine_like(1.0) if kind == "affine-like" else norm_like(1.0, DEFAULT_EPS))


def _gradients(one: Told, kind: str) -> Pair:
    return batch_gradients(one.rows, one.weight, one.needed, DAMPING) if kind == "batch" else one.rows.gradients(one.weight, one.needed)


def _numbers(one: Told, gradients: Gradients, kind: str) -> list[Tensor]:
    """Of a step of gradient descent at the learning rate 1; the measures do not hang on it."""
    sums = row_sums(one.rows, [], one.needed, one.parts(gradients.__getitem__))
    assert sums.pull is not None
    others = interference(sums) if kind != "batch" else torch.full_like(sums.gg.sum(), math.nan)
    return [*vars(summary(sums, sums.pull.times(-1.0), 1.0)).values(), others, sums.used.sum(), (~sums.used).sum()]


def _line(kind: str, one: Told, found: Sequence[float] | None, reason: str) -> Counterfactual:
    *measures, others, rows, masked = found or [math.nan] * len(SUMMARY) + [math.nan, 0.0, 0.0]
    if rows and math.isnan(measures[SUMMARY.index("alignment_median")]):  # that of rows that do not move is 0
        reason = _NOT_FINITE
    return Counterfactual(
        kind=kind,
        module=one.layer.name,
        call=one.number,
        type=one.layer.type,
        rows=int(rows),
        masked=int(masked),
        interference=others,
        basis=_FIRST_ORDER if kind in ("affine-like", "norm-like") else _EXACT,
        reason=reason,
        **dict(zip(SUMMARY, measures, strict=True)),
    )


def _joint_norm(tensors: Mapping[Parameter, Tensor]) -> float:
    return math.hypot(*(length for (length,) in transferred([[norm(t)] for t in tensors.values()])))
