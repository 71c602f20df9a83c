# Units: the settings, lines of settings and budgets of a grid that a part of a claim is about.
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from affine_divergence.lab.claims._protocol import Protocol
from affine_divergence.lab.claims._reading import Cells, Part
from affine_divergence.lab.grid import Grid
from affine_divergence.lab.trial import Cell, Start

AXES = ("activation", "depth", "width", "pattern", "batch_size")
Budget = tuple[int | None, int | None]  # epochs, steps
NO_BUDGET: Budget = (None, None)  # that of settings which the study does not hold


@dataclass(frozen=True)
class Place:
    """A setting that a claim is about, whether or not the study holds it; the cell's method means nothing.

    With `best` each method has the start that is best for it on the validation images; the cell's start then means nothing.
    """

    cell: Cell
    rate_from: int | None
    best: bool = False

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


def at_best(place: Place) -> Place:
    """The place with the best start of each method in place of its own."""
    return replace(place, cell=replace(place.cell, start="torch", signal=None), best=True)


def lines_of(part: Part, grid: Grid, protocol: Protocol | None) -> list[Line]:
    """A part's units in the claim's order; one without a budget where the grid holds no setting of it."""
    held: dict[Place, dict[Budget, None]] = {}
    starts: dict[tuple[Start, float | None], None] = {}
    for series in grid.series():
        place = Place(replace(series.cell.bare, epochs=None, steps=None), series.rate_from).itself
        starts[series.cell.start, series.cell.signal] = None
        for one in (place, at_best(place)):
            held.setdefault(one, {})[series.cell.epochs, series.cell.steps] = None
    found = []
    pooled = part.estimand == "parity"
    lines = [
        [_bare(grid, protocol, cells, start, **place) for place in places]
        for start in _starts(part, protocol, starts)
        for cells in part.cells
        for places in _bare_lines(part, cells, protocol)
    ]
    if protocol and protocol.start == "same":  # starts that the grid does not combine with a setting are not missing from it
        lines = [places for places in lines if any(place.itself in held for place in places)] or lines[:1]
    if pooled:
        lines = [list(dict.fromkeys(place for places in lines for place in places))]
    for places in lines:
        budgets = dict.fromkeys(budget for place in places for budget in held.get(place.itself, ()))
        taken = [budget for budget in budgets if budget[0] is not None or part.estimand == "batch-slope"]
        for epochs, steps in taken or [NO_BUDGET]:
            of_budget = tuple(replace(place, cell=replace(place.cell, epochs=epochs, steps=steps)) for place in places)
            found.append(Line(of_budget, tuple(_coordinate(part, place) for place in places), pooled))
    return found


def _starts(
    part: Part, protocol: Protocol | None, held: Iterable[tuple[Start, float | None]]
) -> list[tuple[Start | Literal["best"], float | None]]:
    if protocol is None:
        return [("torch", None)]
    if protocol.start == "same":
        return list(held)
    return [(protocol.start, 1.0 if protocol.start == "fixed-point" and part.axis != "signal" else None)]


def _bare_lines(part: Part, cells: Cells, protocol: Protocol | None) -> Iterator[tuple[dict[str, Any], ...]]:
    along = part.axis
    fixed = []
    for name in AXES:
        values = getattr(cells, name) or (None,)  # (None,): no pattern
        if name == "batch_size" and protocol and protocol.batch_size:
            values = (protocol.batch_size,)
        if name != along:
            fixed.append([(name, value) for value in values])
    for chosen in itertools.product(*fixed):
        yield tuple(dict(chosen) | ({along: value} if along else {}) for value in (getattr(cells, along) if along else (None,)))


def _bare(
    grid: Grid, protocol: Protocol | None, cells: Cells, start: tuple[Start | Literal["best"], float | None], **axes: Any
) -> Place:
    like = Cell(grid.data, "none", 0, 0, "tanh", 0, None, None, grid.train_images, drop_last=grid.drop_last)
    if protocol:
        like = replace(like, **protocol.training)  # type: ignore[arg-type]
    if start[0] == "best":
        return Place(replace(like, **axes), cells.rate_from_batch_size, best=True)
    return Place(replace(like, **({"start": start[0], "signal": start[1]} | axes)), cells.rate_from_batch_size)


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
    start = ", best starts" if places[0].best else f", start {span('start')}" if span("start") != "torch" else ""
    signal = f", signal {span('signal')}" if len({place.cell.signal for place in places}) > 1 else ""
    return f"{span('depth')} × {span('width')}{pattern}, {span('activation')}, batch {span('batch_size')}{budget}{rate}{start}{signal}"
