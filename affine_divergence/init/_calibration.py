# What a calibration did to each layer, as rows and as a printed table.
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Calibrated(NamedTuple):
    """A layer: the mean square of its outputs on the batch, what it should be, and the factor on its weight and bias."""

    module: str
    type: str
    before: float
    after: float
    target: float
    factor: float
    note: str = ""


@dataclass(frozen=True)
class Calibration:
    """What `calibrate_` did to each layer, in the order of calls; prints as a table.

    rows holds named tuples (module, type, before, after, target, factor, note); before, after and target are mean squares of the
    layer's outputs on the batch. Layers that were left alone come last: NaN in place of numbers, the reason in note.

    >>> print(Calibration((Calibrated("0", "Linear", 2.0, 0.5, 0.5, 0.5),)))
    module  type    before     after  target  factor
    0       Linear   2.000  → 0.5000  0.5000   0.500
    """

    rows: tuple[Calibrated, ...]

    def __str__(self) -> str:
        header = ("module", "type", "before", "  after", "target", "factor", "")
        cells = [header, *((row.module or "(model)", row.type, *_numbers(row), row.note) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in cells)


def _numbers(row: Calibrated) -> tuple[str, str, str, str]:
    if math.isnan(row.factor):
        return "–", "–", "–", "–"
    return f"{row.before:#.4g}", f"→ {row.after:#.4g}", f"{row.target:#.4g}", f"{row.factor:#.3g}"


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    places = enumerate(zip(cells, widths, strict=True))
    return [cell.rjust(width) if 2 <= place <= 5 else cell.ljust(width) for place, (cell, width) in places]
