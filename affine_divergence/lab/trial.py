# A trial: one training run, fully specified, and the key under which its result is stored.
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from affine_divergence.lab.pattern import Pattern, check_depth

Method = Literal[
    "none",
    "batch-norm",
    "layer-norm",
    "layer-norm-sample",
    "layer-norm-position",
    "rms-norm",
    "rms-norm-sample",
    "rms-norm-position",
    "norm-like",
    "norm-like-gain",
    "affine-like",
    "affine-like-gain",
    "sample",
    "batch",
    "foof",
]
# The forward pass is that of none: the weights' gradients alone are corrected, by foof with a running average of the batches' X̃ᵀX̃.
GRADIENT_ONLY: tuple[Method, ...] = ("sample", "batch", "foof")
DAMPED: tuple[Method, ...] = ("batch", "foof")  # which have a damping, tuned beside the learning rate
FOOF_DECAY, FOOF_REFRESH = 0.95, 50  # of its average a step; steps from one inversion to the next
FULLY_CONNECTED: tuple[Method, ...] = ("none", "batch-norm", "layer-norm", "rms-norm", "norm-like", "affine-like", *GRADIENT_ONLY)
# LayerNorm and RMSNorm of images: over all numbers of a sample, or over the channels at each position. The two corrections at gain 1, and
# at gain √(d + 1) for the d numbers of a patch.
CONVOLUTIONAL: tuple[Method, ...] = (
    "none",
    "batch-norm",
    "layer-norm-sample",
    "layer-norm-position",
    "rms-norm-sample",
    "rms-norm-position",
    "norm-like",
    "norm-like-gain",
    "affine-like",
    "affine-like-gain",
)
Activation = Literal["tanh", "leaky-relu"]
Role = Literal["tuning", "evaluation"]

PositiveInt = Annotated[int, Field(ge=1, le=10**9, strict=True)]
LEAST_DAMPING, MOST_DAMPING = 1e-4, 1e6  # below, float32 finds the damped matrices indefinite; above, it is the plain step over the damping
DampingFloat = Annotated[float, Field(ge=LEAST_DAMPING, le=MOST_DAMPING, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


def check_methods(methods: Sequence[Method], pattern: str | None) -> None:
    """Raise ValueError for a method that there is not for the model."""
    known = methods_of(pattern)
    model = "fully-connected nets, without a pattern," if pattern is None else "convolutional nets, with a pattern,"
    for method in methods:
        if method not in known:
            raise ValueError(f"{method} is no method of {model} which have {', '.join(known)}")


def check_damping(method: Method, damping: float | None) -> None:
    """Raise ValueError where a method lacks its damping, or is given one that it has not."""
    if (method in DAMPED) != (damping is not None):
        says = "needs a damping" if damping is None else "has no damping"
        raise ValueError(f"{method} {says}; a damping goes with {' and '.join(DAMPED)} and with no other method")


def methods_of(pattern: str | None) -> tuple[Method, ...]:
    """The methods that there are for fully-connected nets, or for convolutional ones where a pattern is given."""
    return FULLY_CONNECTED if pattern is None else CONVOLUTIONAL


class Trial(BaseModel):
    """One net trained by plain stochastic gradient descent on the mean cross-entropy.

    A fully-connected one; or, with a `pattern` of kernels and strides, a convolutional one, whose width is its channels and whose depth is
    its convolutions. The methods batch and foof have a damping, in units of the mean squared norm of a layer's inputs, the bias's 1
    included.

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
    damping: DampingFloat | None = None
    seed: Seed
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    train_images: PositiveInt | None = None
    pattern: Pattern | None = None
    role: Role = "evaluation"

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    @model_validator(mode="after")
    def _of_one_model(self) -> Self:
        check_methods([self.method], self.pattern)
        check_damping(self.method, self.damping)
        if self.pattern:
            check_depth(self.pattern, self.depth)
        return self

    @property
    def key(self) -> str:
        """The hash of the trial's canonical form: 0.1, 1e-1 and .10 are one learning rate, hence one key."""
        form = self.model_dump()
        for later in ("train_images", "pattern", "damping"):
            if form[later] is None:
                del form[later]  # as before there was such a field
        canonical = json.dumps(form, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def cell(self) -> Cell:
        return Cell(**{name: getattr(self, name) for name in Cell.__dataclass_fields__})

    @property
    def shared(self) -> tuple[Cell, Role]:
        """What trials have in common that can be trained together: all but rate, damping, seed and, in fully-connected nets, method."""
        return self.cell if self.pattern else replace(self.cell, method="none"), self.role


@dataclass(frozen=True)
class Cell:
    """A trial without its learning rate, damping, seed and role: what these two are tuned for."""

    data: str
    method: Method
    width: int
    depth: int
    activation: Activation
    batch_size: int
    epochs: int | None
    steps: int | None
    train_images: int | None = None
    pattern: str | None = None

    @property
    def architecture(self) -> str:
        """Depth × width, and the pattern of a convolutional net."""
        return f"{self.depth} × {self.width}{f' {self.pattern}' if self.pattern else ''}"

    def trial(self, learning_rate: float, seed: int, role: Role, damping: float | None = None) -> Trial:
        return Trial(**asdict(self), learning_rate=learning_rate, damping=damping, seed=seed, role=role)
