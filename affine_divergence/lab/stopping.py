# The rule by which hopeless tuning trials are stopped early: far behind the best trial of the same cell and seed, or without a finite loss.
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Rung(BaseModel):
    """From the share `after` of the budget on, a trial that is more than `behind` points of accuracy below the best is stopped."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
    behind: Annotated[float, Field(gt=0.0, le=100.0, strict=True)]


def _ascending(rungs: tuple[Rung, ...]) -> tuple[Rung, ...]:
    after = [rung.after for rung in rungs]
    if after != sorted(set(after)):
        raise ValueError(f"the rungs of stop must have ascending values of after, got {after}")
    return rungs


Stop = Annotated[tuple[Rung, ...], Field(min_length=1), AfterValidator(_ascending)]


class Standing(NamedTuple):
    """A trial at the end of an epoch: what it is compared within (its cell and seed), its validation accuracy, its training loss."""

    group: Hashable
    accuracy: float
    loss: float


def stopped(stop: Sequence[Rung], share: float, standings: Sequence[Standing]) -> dict[int, str]:
    """The places of the trials to stop after this epoch, with the reasons; `share` of the budget is spent.

    >>> stopped([Rung(after=0.2, behind=10.0)], 0.3, [Standing("a", 0.5, 1.0), Standing("a", 0.3, 1.0), Standing("b", 0.3, 1.0)])
    {1: '30.0 % validation accuracy, 20.0 points behind the best of its cell and seed'}
    """
    best: dict[Hashable, float] = {}
    for standing in standings:
        if math.isfinite(standing.loss):
            best[standing.group] = max(standing.accuracy, best.get(standing.group, 0.0))
    passed = [rung.behind for rung in stop if rung.after <= share]
    reasons: dict[int, str] = {}
    for place, standing in enumerate(standings):
        if not math.isfinite(standing.loss):
            reasons[place] = "its loss is not finite"
            continue
        gap = 100.0 * (best[standing.group] - standing.accuracy)
        if passed and gap > passed[-1]:
            reasons[place] = f"{100.0 * standing.accuracy:.1f} % validation accuracy, {gap:.1f} points behind the best of its cell and seed"
    return reasons
