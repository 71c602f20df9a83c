# Units: the settings, lines of settings and budgets of a grid that a part of a claim is about.
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from affine_divergence.lab.claims._reading import Cells, Part
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.trial import Cell

AXES = ("activation", "depth", "width", "pattern", "batch_size")
Budget = tuple[int | None, int | None]  # epochs, steps
NO_BUDGET: Budget = (None, None)  # that of settings which the study does not hold


@dataclass(frozen=True)
class Place:
    """A setting that a claim is about, whether or not the study holds it; the cell's method means nothing."""

    cell: Cell
    rate_from: int | None

    @property
    def name(self) -> str:
        return name_of((self,))

    @property
    def itself(self) -> Place:
        """The place with rates tuned for it, where it is at the rate of its own batch size: their trials are the same."""
        return replace(self, rate_from=None) if self.rate_from == self.cell.batch_size else self


@dataclass(frozen=True)
class Line:
    """The places of one unit: a single one, several along an axis, with their coordinates on it, or several of which the mean is taken."""

    places: tuple[Place, ...]
    x: tuple[float, ...]
    pooled: bool = False

    @property
    def name(self) -> str:
        return f"mean of {len(self.places)}: {name_of(self.places, pooled=True)}" if self.pooled else name_of(self.places)


def lines_of(part: Part, grid: Grid) -> list[Line]:
    """A part's units in the claim's order; one without a budget where the grid holds no setting of it."""
    held: dict[Place, dict[Budget, None]] = {}
    for series in grid.series():
        bare = Place(replace(series.cell, method="none", epochs=None, steps=None), series.rate_from)
        held.setdefault(bare.itself, {})[series.cell.epochs, series.cell.steps] = None
    found = []
    pooled = part.estimand == "parity"
    lines = [places for cells in part.cells for places in _bare_lines(part, cells, grid)]
    if pooled:
        lines = [tuple(dict.fromkeys(place for places in lines for place in places))]
    for places in lines:
        budgets = dict.fromkeys(budget for place in places for budget in held.get(place.itself, ()))
        taken = [budget for budget in budgets if budget[0] is not None or part.estimand == "batch-slope"]
        for epochs, steps in taken or [NO_BUDGET]:
            of_budget = tuple(Place(replace(place.cell, epochs=epochs, steps=steps), place.rate_from) for place in places)
            found.append(Line(of_budget, tuple(_coordinate(part, place) for place in places), pooled))
    return found


def _bare_lines(part: Part, cells: Cells, grid: Grid) -> Iterator[tuple[Place, ...]]:
    along = part.axis
    fixed = [[(name, value) for value in getattr(cells, name) or (None,)] for name in AXES if name != along]  # (None,): no pattern
    for chosen in itertools.product(*fixed):
        values = [{along: value} for value in getattr(cells, along)] if along else [{}]
        places = (dict(chosen) | value for value in values)
        yield tuple(_bare(grid, cells.rate_from_batch_size, **place) for place in places)


def _bare(grid: Grid, rate_from: int | None, **axes: Any) -> Place:
    like = Cell(grid.data, "none", 0, 0, "tanh", 0, None, None, grid.train_images, drop_last=grid.drop_last)
    return Place(replace(like, **axes), rate_from)


def _coordinate(part: Part, place: Place) -> float:
    if part.axis is None:
        return 0.0
    value = getattr(place.cell, part.axis)
    return float(value) if part.axis == "depth" else math.log2(value)


def name_of(places: Sequence[Place], *, pooled: bool = False) -> str:
    """What the places have in common, with the ends of the axis along which they differ, or all values: 3 × 4…256, tanh, batch 32."""

    def span(name: str) -> str:
        values = list(dict.fromkeys(str(value) for place in places if (value := getattr(place.cell, name)) is not None))
        return "/".join(values) if pooled or len(values) < 2 else f"{values[0]}…{values[-1]}"

    cell = places[0].cell
    pattern = f" {span('pattern')}" if span("pattern") else ""
    budget = f", {cell.epochs} epochs" if cell.epochs else f", {cell.steps} steps" if cell.steps else ""
    rate = f", rate of batch {places[0].rate_from}" if places[0].rate_from else ""
    return f"{span('depth')} × {span('width')}{pattern}, {span('activation')}, batch {span('batch_size')}{budget}{rate}"
