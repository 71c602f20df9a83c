# A trial: one training run, fully specified, and the key under which its result is stored.
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["none", "batch-norm", "layer-norm", "rms-norm", "norm-like", "affine-like"]
Activation = Literal["tanh", "leaky-relu"]
Role = Literal["tuning", "evaluation"]

PositiveInt = Annotated[int, Field(ge=1, le=10**9, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class Trial(BaseModel):
    """One fully-connected net trained by plain stochastic gradient descent on the mean cross-entropy.

    A tuning trial never sees the test images; an evaluation trial is tested once, after its last step. With `train_images` only the
    first that many images of the training part are used, in its fixed random order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    method: Method
    width: PositiveInt
    depth: PositiveInt
    activation: Activation
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    seed: Seed
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    train_images: PositiveInt | None = None
    role: Role = "evaluation"

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    @property
    def key(self) -> str:
        """The hash of the trial's canonical form: 0.1, 1e-1 and .10 are one learning rate, hence one key."""
        form = self.model_dump()
        if self.train_images is None:
            del form["train_images"]  # as before there was such a field
        canonical = json.dumps(form, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def cell(self) -> Cell:
        return Cell(**{name: getattr(self, name) for name in Cell.__dataclass_fields__})

    @property
    def shared(self) -> tuple[Cell, Role]:
        """What trials have in common that can be trained together: all but the method, the learning rate and the seed."""
        return replace(self.cell, method="none"), self.role


@dataclass(frozen=True)
class Cell:
    """A trial without its learning rate, seed and role: what a learning rate is tuned for."""

    data: str
    method: Method
    width: int
    depth: int
    activation: Activation
    batch_size: int
    epochs: int | None
    steps: int | None
    train_images: int | None = None

    def trial(self, learning_rate: float, seed: int, role: Role) -> Trial:
        return Trial(**asdict(self), learning_rate=learning_rate, seed=seed, role=role)
