# Protocols: how the networks are trained and started whose accuracies a claim is judged by.
from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from affine_divergence.lab.trial import Decay, Method, Optimizer, PositiveInt, Schedule, Standardise, Start, check_optimizer


class Protocol(BaseModel):
    """Start, optimiser and learning rates under which claims are judged.

    `start`: one start for all methods; "best", for each method the one with the highest mean validation accuracy; or "same", every
    start in turn, both sides of a comparison at it. `rivals` keeps those rivals of a claim only, `batch_size` replaces the claim's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    statement: Annotated[str, Field(min_length=1)]
    claims: Annotated[tuple[str, ...], Field(min_length=1)]
    start: Literal["best", "same"] | Start
    rates: Literal["tuned", "given"] = "tuned"
    rivals: Annotated[tuple[Method, ...], Field(min_length=1)] | None = None
    batch_size: PositiveInt | None = None
    optimizer: Optimizer = "sgd"
    weight_decay: Decay = 0.0
    schedule: Schedule = "constant"
    standardise: Standardise = "channel"

    @model_validator(mode="after")
    def _sound(self) -> Self:
        check_optimizer(self.optimizer, self.weight_decay)
        return self

    @property
    def training(self) -> dict[str, object]:
        """The fields of a cell that it fixes, but for the start."""
        return {name: getattr(self, name) for name in ("optimizer", "weight_decay", "schedule", "standardise")}
