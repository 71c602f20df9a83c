# Quantiles of the rows that are not masked, as numpy's linear ones.
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def quantiles(values: Tensor, used: Tensor | None, shares: Sequence[float]) -> Tensor:
    """Of the used ones, None being all; NaN where there is none, or NaN among them."""
    if values.device.type == "cpu":
        return _by_partition(values, used, shares)
    return _by_sorting(values, torch.ones_like(values, dtype=torch.bool) if used is None else used, shares)


def _by_partition(values: Tensor, used: Tensor | None, shares: Sequence[float]) -> Tensor:
    # 65,536 rows: 0.6 ms, where torch.sort takes 4.
    chosen = (values if used is None or bool(used.all()) else values[used]).numpy()
    if not len(chosen) or np.isnan(chosen).any():
        return values.new_full((len(shares),), torch.nan)
    places = np.asarray(shares) * (len(chosen) - 1)
    low, high = np.floor(places).astype(int), np.ceil(places).astype(int)
    parted = np.partition(chosen, np.unique(np.concatenate([low, high])))
    return _between(*(torch.from_numpy(a) for a in (parted[low], parted[high], places - low)))


def _by_sorting(values: Tensor, used: Tensor, shares: Sequence[float]) -> Tensor:
    # Nothing here waits for the device.
    number = used.sum()
    spoilt = (number == 0) | (values.isnan() & used).any()
    ordered = torch.where(used, values, torch.inf).sort().values
    places = torch.tensor(shares, dtype=values.dtype, device=values.device) * (number - 1).clamp(min=0)
    low, high = places.floor().long(), places.ceil().long()
    if not len(ordered):
        return places.new_full((len(shares),), torch.nan)
    return torch.where(spoilt, torch.nan, _between(ordered[low], ordered[high], places - low))


def _between(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    return torch.where(low == high, low, low + share * (high - low))  # equal ones may be infinite
