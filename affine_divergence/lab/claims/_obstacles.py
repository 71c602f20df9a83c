# Obstacles: why a unit of a claim, or a comparison in it, has no verdict.
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from affine_divergence.lab.claims._estimands import Sample
from affine_divergence.lab.claims._reading import Part
from affine_divergence.lab.claims._units import NO_BUDGET, Line, Place
from affine_divergence.lab.summary import MethodRow
from affine_divergence.lab.trial import Method

LEAST_ACCURACY = 15.0  # %, 1.5 times chance: below it at its best rate, a method did not train
MOST_LATE_GAIN = 0.5  # points of validation accuracy per epoch at the end: above it, the budget decides

Kind = Literal["not run", "too few seeds", "rate at the edge", "did not train", "budget-bound"]


@dataclass(frozen=True)
class Obstacle:
    """Why a unit is beyond a verdict."""

    kind: Kind
    detail: str


@dataclass(frozen=True)
class Member:
    """A cell of a unit, and its runs if it has any."""

    place: Place
    method: Method
    row: MethodRow | None


def comparison_obstacles(part: Part, sample: Sample) -> Iterator[Obstacle]:
    """Why a comparison has no verdict: each reason once, with its cells."""
    rows = [row for row in sample.needs if row]
    if len(rows) < len(sample.needs):
        yield Obstacle("not run", "a cell of it is not finished")
    elif len(sample.values) < 2:
        yield Obstacle("too few seeds", f"{sample.against} shares {len(sample.values)}")
    reasons: list[tuple[Kind, Callable[[MethodRow], str]]] = [("rate at the edge", lambda row: row.edge)]
    if part.needs_training:
        reasons += [("did not train", _untrained), ("budget-bound", _gaining)]
    for kind, detail in reasons:
        said = [f"{row.cell.name}, {row.cell.architecture}, {row.cell.activation} ({text})" for row in rows if (text := detail(row))]
        if said:
            yield Obstacle(kind, "; ".join(dict.fromkeys(said)))


def _untrained(row: MethodRow) -> str:
    return f"{100 * row.validation:.1f} % on validation" if 100 * row.validation < LEAST_ACCURACY else ""


def _gaining(row: MethodRow) -> str:
    gain = row.late_gain
    return f"gains {gain:.2f} points an epoch at the end" if gain is not None and gain > MOST_LATE_GAIN else ""


def unit_obstacles(line: Line, members: Sequence[Member], samples: Sequence[Sample]) -> list[Obstacle]:
    """Why a unit has no verdict where all of its cells are needed."""
    found = []
    if all(member.row is None for member in members):
        planned = all((place.cell.epochs, place.cell.steps) != NO_BUDGET for place in line.places)
        return [Obstacle("not run", "nothing of it is finished" if planned else "the study does not hold it")]
    absent = [place for place in line.places if all(member.row is None for member in members if member.place == place)]
    missing = [f"{member.method} at {member.place.name}" for member in members if member.row is None and member.place not in absent]
    if absent or missing:
        found.append(Obstacle("not run", "; ".join([place.name for place in absent] + missing)))
    few = [f"{member.method} at {member.place.name} has one" for member in members if member.row and member.row.accuracy.n < 2]
    few += [f"{one.against} shares {len(one.values)}" for one in samples if len(one.values) < 2 and not found and not few]
    if few:
        found.append(Obstacle("too few seeds", "; ".join(few)))
    edges = [f"{member.method} at {member.place.name} ({member.row.edge})" for member in members if member.row and member.row.at_edge]
    if edges:
        found.append(Obstacle("rate at the edge", "; ".join(edges)))
    return found
