# A trial: one training run, fully specified, and the key under which its result is stored.
from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from affine_divergence.lab.pattern import Pattern, check_depth
from affine_divergence.lab.stopping import Stop

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
# Methods with a gain written into their name, from before there was the field; a new grid names the method and its gain.
NAMED_GAIN: tuple[Method, ...] = ("norm-like-gain", "affine-like-gain")
GAINED: tuple[Method, ...] = ("norm-like", "affine-like")  # which take a gain
Activation = Literal["tanh", "leaky-relu"]
# Initial weights, and the scale at which each method hands its layer's input on. Defined in training/_starts.py.
Start = Literal["torch", "glorot-he", "hidden-gain", "orthogonal", "fixed-point", "xavier"]
Gain = Literal["auto"] | Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["constant", "linear"]  # linear: from the learning rate down to 0 after the last step
Standardise = Literal["channel", "pixel"]
Role = Literal["tuning", "evaluation"]

PositiveInt = Annotated[int, Field(ge=1, le=10**9, strict=True)]
LEAST_DAMPING, MOST_DAMPING = 1e-4, 1e6  # below, float32 finds the damped matrices indefinite; above, it is the plain step over the damping
DampingFloat = Annotated[float, Field(ge=LEAST_DAMPING, le=MOST_DAMPING, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]
Decay = Annotated[float, Field(ge=0.0, allow_inf_nan=False, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


# Fields that came later, with the value that older trials have; a trial's key leaves them out where they hold it.
LATER_FIELDS: dict[str, object] = {
    "train_images": None,
    "pattern": None,
    "damping": None,
    "start": "torch",
    "gain": None,
    "signal": None,
    "optimizer": "sgd",
    "weight_decay": 0.0,
    "schedule": "constant",
    "standardise": "channel",
    "drop_last": False,
    "stop": None,
}


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


def check_start(method: Method, start: Start) -> None:
    """Raise ValueError for a start that the method does not have."""
    if method in NAMED_GAIN and start != "torch":
        raise ValueError(f'{method} has the start torch only; write method = "{method.removesuffix("-gain")}" and gain = "auto" for others')
    if start == "hidden-gain" and method in ("none", *GRADIENT_ONLY):
        raise ValueError(f"{method} has no start hidden-gain, which scales what a method divides by; put {method} into a block without it")


def check_signal(signal: float, activation: Activation, numbers: int) -> None:
    """Raise ValueError for a squared norm that rows of so many activations cannot have."""
    if activation == "tanh" and not signal < 0.99 * numbers:
        raise ValueError(f"tanh activations are below 1, so {numbers} of them cannot have the squared norm signal = {signal:g}; want less")


def check_optimizer(optimizer: Optimizer, weight_decay: float) -> None:
    """Raise ValueError for a weight decay that the optimiser does not have."""
    if weight_decay and optimizer != "adamw":
        raise ValueError(f"weight_decay goes with optimizer adamw, got weight_decay = {weight_decay:g} with {optimizer}")


def methods_of(pattern: str | None) -> tuple[Method, ...]:
    """The methods that there are for fully-connected nets, or for convolutional ones where a pattern is given."""
    return FULLY_CONNECTED if pattern is None else CONVOLUTIONAL


class Trial(BaseModel):
    """One net trained by plain stochastic gradient descent on the mean cross-entropy.

    A fully-connected one; or, with a `pattern` of kernels and strides, a convolutional one, whose width is its channels and whose depth is
    its convolutions. The methods batch and foof have a damping, in units of the mean squared norm of a layer's inputs, the bias's 1
    included.

    `start` says how the weights begin, `gain` replaces the gain that the start gives a correction (auto: √(fan-in + 1)), and `signal` is
    the squared norm that the start fixed-point keeps (1 where it is left out). `drop_last` leaves out a short last minibatch of each
    epoch.

    A tuning trial never sees the test images; an evaluation trial is tested once, after its last step. With `train_images` only the
    first that many images of the training part are used, in its fixed random order. `stop` is the rule by which a tuning trial is
    stopped early; its result then depends on the other trials of its cell and seed that are trained with it.
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
    start: Start = "torch"
    gain: Gain | None = None
    signal: PositiveFloat | None = None
    optimizer: Optimizer = "sgd"
    weight_decay: Decay = 0.0
    schedule: Schedule = "constant"
    standardise: Standardise = "channel"
    drop_last: Annotated[bool, Field(strict=True)] = False
    stop: Stop | None = None
    role: Role = "evaluation"

    @model_validator(mode="before")
    @classmethod
    def _unit_signal(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("start") == "fixed-point" and values.get("signal") is None:
            return {**values, "signal": 1.0}
        return values

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self

    @model_validator(mode="after")
    def _of_one_model(self) -> Self:
        check_methods([self.method], self.pattern)
        check_damping(self.method, self.damping)
        check_start(self.method, self.start)
        check_optimizer(self.optimizer, self.weight_decay)
        if self.gain is not None and self.method not in GAINED:
            raise ValueError(f"{self.method} has no gain; a gain goes with {' and '.join(GAINED)} and with no other method")
        if self.signal is not None:
            if self.start != "fixed-point":
                raise ValueError(f"signal goes with the start fixed-point, got the start {self.start}")
            check_signal(self.signal, self.activation, self.width)
        if self.pattern:
            check_depth(self.pattern, self.depth)
        if self.stop is not None and self.role != "tuning":
            raise ValueError("stop goes with tuning trials only; an evaluation trial uses its whole budget")
        return self

    @property
    def key(self) -> str:
        """The hash of the trial's canonical form: 0.1, 1e-1 and .10 are one learning rate, hence one key."""
        form = self.model_dump()
        for name, default in LATER_FIELDS.items():
            if form[name] == default:
                del form[name]  # as before there was such a field
        canonical = json.dumps(form, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def cell(self) -> Cell:
        return Cell(**{name: getattr(self, name) for name in Cell.__dataclass_fields__})

    @property
    def shared(self) -> tuple[Cell, Role, Stop | None]:
        """What trials have in common that can be trained together.

        All but rate, damping, seed, start and gain, and in fully-connected nets the method.
        """
        cell = replace(self.cell, start="torch", gain=None, signal=None)
        return cell if self.pattern else replace(cell, method="none"), self.role, self.stop


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
    start: Start = "torch"
    gain: Gain | None = None
    signal: float | None = None
    optimizer: Optimizer = "sgd"
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    standardise: Standardise = "channel"
    drop_last: bool = False

    @property
    def name(self) -> str:
        """The method, with its gain where one is given."""
        return self.method if self.gain is None else f"{self.method} gain {self.gain if self.gain == 'auto' else f'{self.gain:g}'}"

    @property
    def start_name(self) -> str:
        """The start in words, empty for torch's."""
        if self.start == "torch":
            return ""
        return f"start {self.start}" + (f", signal {self.signal:g}" if self.signal is not None else "")

    @property
    def training_name(self) -> str:
        """What differs from gradient descent at a constant rate on images standardised by channel, in words."""
        decay = f" with weight decay {self.weight_decay:g}" if self.weight_decay else ""
        parts = [f"AdamW{decay}"] if self.optimizer == "adamw" else []
        parts += ["rate falling linearly to 0"] if self.schedule == "linear" else []
        parts += ["each pixel standardised"] if self.standardise == "pixel" else []
        return ", ".join(parts)

    @property
    def bare(self) -> Cell:
        """The cell without what tells one method from another: what methods are compared in."""
        return replace(self, method="none", gain=None)

    @property
    def architecture(self) -> str:
        """Depth × width, and the pattern of a convolutional net."""
        return f"{self.depth} × {self.width}{f' {self.pattern}' if self.pattern else ''}"

    def trial(self, learning_rate: float, seed: int, role: Role, damping: float | None = None, stop: Stop | None = None) -> Trial:
        return Trial(**asdict(self), learning_rate=learning_rate, damping=damping, seed=seed, role=role, stop=stop)
