# The rows of a call themselves, as many as a scatter can show.
from __future__ import annotations

import torch

from affine_divergence.diagnostics._measures import alignments, multipliers
from affine_divergence.diagnostics._records import Samples
from affine_divergence.diagnostics._step import Account

KEPT = 2000
_EXTREME = 20


def samples_of(account: Account, kept: int = KEPT) -> Samples:
    """Of the change that the optimiser made: every so many rows, and always those least aligned and those of the largest multipliers."""
    sums, moved, rows = account.sums, account.sums.moved[0], account.told.rows
    multiplier, alignment = rows.in_axes(multipliers(sums, moved, account.lr)), rows.in_axes(alignments(sums, moved))
    used, gradient = rows.in_axes(sums.used), rows.in_axes(sums.gg.sqrt())
    usual = ~used | multiplier.isnan() | alignment.isnan()  # no extremes
    places = _chosen(multiplier.masked_fill(usual, 0.0), alignment.masked_fill(usual, 1.0), kept)
    shown = torch.stack([multiplier, alignment, torch.where(used, gradient, 0.0)])[:, places].tolist()
    return Samples(
        module=account.told.layer.name,
        call=account.told.number,
        axes=rows.axes,
        index=tuple(places.tolist()),
        total=len(sums.gg),
        multiplier=tuple(shown[0]),
        alignment=tuple(shown[1]),
        gradient=tuple(shown[2]),
    )


def _chosen(multiplier: torch.Tensor, alignment: torch.Tensor, kept: int) -> torch.Tensor:
    total = len(multiplier)
    if total <= kept:
        return torch.arange(total, device=multiplier.device)
    extreme = min(_EXTREME, kept // 4)
    even = torch.linspace(0, total - 1, kept - 2 * extreme, device=multiplier.device).long()
    least = alignment.topk(extreme, largest=False).indices
    places: torch.Tensor = torch.cat([even, least, multiplier.abs().topk(extreme).indices]).unique()
    return places
