# Numbers from the device to Python, all in one transfer: one wait for each would cost more than what they say.
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor


def transferred(rows: Sequence[Sequence[Tensor]]) -> list[list[float]]:
    """0-dimensional tensors as floats, one transfer for each device."""
    flat = [number for row in rows for number in row]
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(flat):
        by_device.setdefault(number.device, []).append(place)
    found = [0.0] * len(flat)
    for device, places in by_device.items():
        values = torch.stack([flat[place].to(solve_dtype(device)) for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = value
    numbers = iter(found)
    return [[next(numbers) for _ in row] for row in rows]
