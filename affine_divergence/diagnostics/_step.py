# One step of an optimiser, told row by row: from the calls and the change of the parameters to rows with verdicts.
from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._change import Before, norm
from affine_divergence.diagnostics._gradients import Gradients
from affine_divergence.diagnostics._layers import Layer
from affine_divergence.diagnostics._measures import SHARES, SUMMARY, Moved, RowSums, efficiency, interference, row_sums, summary
from affine_divergence.diagnostics._quantiles import quantiles
from affine_divergence.diagnostics._rank import rank
from affine_divergence.diagnostics._records import Row
from affine_divergence.diagnostics._told import Told
from affine_divergence.diagnostics._transfer import transferred
from affine_divergence.diagnostics._verdict import verdict

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Account:
    """What a call's row is made of: its sums, the learning rate, and its numbers on the device."""

    told: Told
    sums: RowSums
    plain: list[Tensor] | None  # Σ of the rows of what the plain gradient would do
    lr: float
    numbers: dict[str, Tensor]
    rank_limit: int | None
    assumed: bool  # the learning rate


def account(one: Told, before: Before, gradients: Gradients | None, *, ranks: bool) -> Account:
    """The measures of a call; those of the plain gradient where it is given."""
    leading = one.leading(before)
    lr = before.lr[leading.parameter]
    place, size = one.layer.parts.index(leading), before.length(leading)
    size = torch.where(size.isfinite(), size, torch.nan)  # of an infinite weight any step would be a ratio of 0
    own = one.parts(before.change)
    gradient = None if gradients is None else one.parts(gradients.__getitem__)
    apart = gradients is not None and any(before.lr[part.parameter] != lr for part in one.changing())
    descended = one.parts(lambda p: -before.lr[p] * gradients[p]) if apart and gradients is not None else None
    sums = row_sums(one.rows, [own] if descended is None else [own, descended], one.needed, gradient)
    numbers = dict(vars(summary(sums, sums.moved[0], lr)))
    numbers["update_ratio"] = _length(own[place]) / size
    alone = quantiles(_alone(one, sums.own), sums.used, SHARES)
    numbers.update(zip(("self_term_p5", "self_term_median", "self_term_p95"), alone, strict=True))
    numbers["rows"] = sums.used.sum()
    plain = None
    if sums.pull is not None and gradient is not None:
        plain = sums.pull.times(-lr) if descended is None else sums.moved[1]
        numbers.update({f"{name}_plain": number for name, number in vars(summary(sums, plain, lr)).items()})
        numbers["update_ratio_plain"] = abs(lr) * _length(gradient[place]) / size
        numbers["interference"] = interference(sums)
    limit = None
    if ranks:
        numbers["rank"], limit = rank(one.rows, one.needed, one.weight)
    return Account(one, sums, None if plain is None else _added(sums, plain), lr, numbers, limit, before.assumed)


def together(family: Sequence[Account]) -> dict[str, Tensor]:
    """The efficiency of all calls that share parameters, of the step and of the plain gradient.

    Of one of them it may be above 0 in a step that goes down.
    """
    found = {"together": [_added(one.sums, one.sums.moved[0]) for one in family]}
    plain = [one.plain for one in family if one.plain is not None]
    if plain:
        found["together_plain"] = plain
    return {name: efficiency(*(torch.stack(column).sum() for column in zip(*of, strict=True))) for name, of in found.items()}


def _added(sums: RowSums, moved: Moved) -> list[Tensor]:
    """Σ ⟨δz_i, g_i⟩, Σ ‖δz_i‖² and Σ ‖g_i‖² of the rows that are not masked."""
    return [torch.where(sums.used, t, 0.0).sum() for t in (*moved, sums.gg)]


def rows_of(accounts: Sequence[Account], unexplained: Mapping[Layer, str], aside: Container[Layer]) -> list[Row]:
    """The rows, with verdicts.

    unexplained: why the rows of a layer are not known to make its gradients; aside: the layers that a pass with create_graph=True reached.
    """
    found = transferred([[*one.numbers.values()] for one in accounts])
    return [
        _row(one, dict(zip(one.numbers, values, strict=True)), unexplained.get(one.told.layer, ""), one.told.layer in aside)
        for one, values in zip(accounts, found, strict=True)
    ]


def _row(one: Account, found: Mapping[str, float], check: str, aside: bool) -> Row:
    measures = (*SUMMARY, "update_ratio")
    values: dict[str, Any] = dict.fromkeys((*measures, *(f"{name}_plain" for name in measures), "interference"), math.nan) | dict(found)
    values["rows"] = int(found["rows"])
    values["masked"] = one.sums.used.numel() - values["rows"]
    kept = found.get("rank", math.nan)
    values["rank"] = None if math.isnan(kept) else int(kept)
    layer = one.told.layer
    jointly = values.pop("together"), values.pop("together_plain", math.nan)
    ruling, reason = verdict(values, one.lr, *jointly, assumed=one.assumed, check=check, aside=aside)
    return Row(module=layer.name, call=one.told.number, type=layer.type, verdict=ruling, reason=reason, rank_limit=one.rank_limit, **values)


def _length(delta: Tensor | None) -> Tensor:
    assert delta is not None
    return norm(delta)


def _alone(one: Told, own: Tensor) -> Tensor:
    """The multipliers that the rows would have alone: G_ii, over that of all that learns by the sample correction.

    What the batch correction makes is not said.
    """
    if one.layer.correction == "batch":
        return torch.full_like(own, torch.nan)
    if one.layer.correction != "sample":
        return own
    rows = one.rows
    divisor = own if one.learns == one.needed else rows.map.self_term(rows.x, rows.map.vectors(rows.g), one.learns).flatten().to(own.dtype)
    return torch.where(own.isfinite(), torch.where(divisor > 0, own / divisor, 0.0), torch.nan)
