# Grid files: which trials a study is made of, and how its learning rates are tuned.
from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.pattern import Pattern, check_depth
from affine_divergence.lab.stopping import Stop
from affine_divergence.lab.trial import (
    DAMPED,
    GAINED,
    Activation,
    Cell,
    DampingFloat,
    Decay,
    Gain,
    Method,
    Optimizer,
    PositiveFloat,
    PositiveInt,
    Schedule,
    Seed,
    Standardise,
    Start,
    Trial,
    check_methods,
    check_signal,
    check_start,
)

MAX_TRIALS = 1_000_000
CLOSEST = 1.02  # a range of learning rates is continued by numbers of three digits


class Axes(BaseModel):
    """The values whose product is a block of the grid; a single value may stand without brackets.

    `damping` belongs to the methods batch and foof alone: their product with it is taken, the other methods do not see it. So it is with
    `gain` and the corrections norm-like and affine-like, `signal` and the start fixed-point, `weight_decay` and AdamW.
    With `rate_from_batch_size` nothing is tuned here: each cell is tested at the learning rate, and damping, chosen for it at that batch
    size.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[tuple[Method, ...], Field(min_length=1)]
    width: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    depth: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    pattern: Annotated[tuple[Pattern, ...], Field(min_length=1)] | None = None
    activation: Annotated[tuple[Activation, ...], Field(min_length=1)]
    batch_size: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    learning_rate: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    damping: Annotated[tuple[DampingFloat, ...], Field(min_length=1)] | None = None
    rate_from_batch_size: PositiveInt | None = None
    seed: Annotated[tuple[Seed, ...], Field(min_length=1)]
    epochs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    start: Annotated[tuple[Start, ...], Field(min_length=1)] = ("torch",)
    gain: Annotated[tuple[Gain, ...], Field(min_length=1)] | None = None
    signal: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    optimizer: Annotated[tuple[Optimizer, ...], Field(min_length=1)] = ("sgd",)
    weight_decay: Annotated[tuple[Decay, ...], Field(min_length=1)] | None = None
    schedule: Annotated[tuple[Schedule, ...], Field(min_length=1)] = ("constant",)
    standardise: Annotated[tuple[Standardise, ...], Field(min_length=1)] = ("channel",)

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        single = "rate_from_batch_size"
        return {name: value if isinstance(value, list | tuple) or name == single else [value] for name, value in values.items()}

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        if (self.learning_rate is None) == (self.rate_from_batch_size is None):
            raise ValueError("give either learning_rate or rate_from_batch_size")
        damped = [method for method in self.method if method in DAMPED]
        if damped and self.learning_rate is not None and self.damping is None:
            raise ValueError(f"{damped[0]} needs a damping: give values such as damping = [0.01, 0.1, 1.0]")
        if self.damping is not None and not (damped and self.learning_rate is not None):
            raise ValueError(f"damping goes with the methods {' and '.join(DAMPED)}, where a learning_rate is given; leave it out here")
        count = math.prod(len(values) for _, values in self if isinstance(values, tuple))
        if count > MAX_TRIALS:
            raise ValueError(f"asks for {count:,} trials; at most {MAX_TRIALS:,} go into one block")
        for name, values in self:
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{name} holds a value twice: {list(values)}")
        for pattern in self._patterns:
            check_methods(self.method, pattern)
        for method, start in itertools.product(self.method, self.start):
            check_start(method, start)
        if self.gain is not None and not set(self.method) & set(GAINED):
            raise ValueError(f"gain goes with the methods {' and '.join(GAINED)}; leave it out here")
        if self.signal is not None and "fixed-point" not in self.start:
            raise ValueError("signal goes with the start fixed-point; leave it out here")
        if "fixed-point" in self.start:
            for signal, activation in itertools.product(self.signal or (1.0,), self.activation):
                check_signal(signal, activation, min(self.width))
        if self.weight_decay is not None and "adamw" not in self.optimizer:
            raise ValueError("weight_decay goes with optimizer adamw; leave it out here")
        for pattern, depth in itertools.product(self.pattern or (), self.depth):
            check_depth(pattern, depth)
        return self

    @property
    def _patterns(self) -> tuple[str | None, ...]:
        return self.pattern or (None,)

    def cells(self, data: str, train_images: int | None, drop_last: bool) -> Iterator[Cell]:
        """Every combination of the axes but learning rate and seed, in the file's order.

        A gain is combined with the corrections alone, a signal with the start fixed-point, a weight decay with AdamW.
        """
        budgets = [(epochs, None) for epochs in self.epochs or ()] + [(None, steps) for steps in self.steps or ()]
        trainings = [
            (optimizer, decay, schedule, standardise, drop_last)
            for optimizer, schedule, standardise in itertools.product(self.optimizer, self.schedule, self.standardise)
            for decay in (self.weight_decay if optimizer == "adamw" and self.weight_decay else (0.0,))
        ]
        starts = [(start, signal) for start in self.start for signal in ((self.signal or (1.0,)) if start == "fixed-point" else (None,))]
        methods = [(method, gain) for method in self.method for gain in (self.gain if self.gain and method in GAINED else (None,))]
        product = itertools.product(
            self.width, self.depth, self._patterns, self.activation, self.batch_size, budgets, trainings, starts, methods
        )
        for width, depth, pattern, activation, batch_size, (epochs, steps), training, (start, signal), (method, gain) in product:
            yield Cell(
                data, method, width, depth, activation, batch_size, epochs, steps, train_images, pattern, start, gain, signal, *training
            )


class Tuning(BaseModel):
    """Two-stage tuning: every `stride`-th rate with the first seed, then the best one's neighbours with every seed; so for each damping.

    `stop` is the rule by which a trial is stopped early, as a table or as a list of tables.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    stride: PositiveInt = 2
    extend: Annotated[int, Field(ge=0, le=10, strict=True)] = 2
    stop: Stop | None = None

    @model_validator(mode="before")
    @classmethod
    def _rungs(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("stop"), dict):
            return {**values, "stop": [values["stop"]]}
        return values

    def trial(self, cell: Cell, learning_rate: float, seed: int, damping: float | None = None) -> Trial:
        """A tuning trial of a cell, with the stop rule."""
        return cell.trial(learning_rate, seed, "tuning", damping, self.stop)


@dataclass(frozen=True)
class Series:
    """A cell to be tested with some seeds, at the learning rate chosen for `rate_of`: itself, or its like with another batch size."""

    cell: Cell
    rate_of: Cell
    seeds: tuple[int, ...]
    rate_from: int | None  # the batch size that the rate is taken from, where the grid file says so


class Grid(BaseModel):
    """A study's grid file, checked: one block of axes, `[grid]`, or several whose trials are joined, `[[grid]]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: Annotated[str, Field(min_length=1)]
    train_images: PositiveInt | None = None
    drop_last: StrictBool = True
    claims: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    grid: Annotated[tuple[Axes, ...], Field(min_length=1)]
    tuning: Tuning | None = None

    @model_validator(mode="before")
    @classmethod
    def _blocks(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("grid"), dict):
            return {**values, "grid": [values["grid"]]}
        return values

    @model_validator(mode="after")
    def _sound(self) -> Self:
        rates, dampings = self.rates(), self.dampings()
        untuned = sorted({series.rate_of.batch_size for series in self.series() if series.rate_of not in rates})
        if untuned:
            raise ValueError(f"rate_from_batch_size = {untuned[0]}, but no block tunes the like of every cell there at that batch size")
        if self.tuning is not None:
            shared = sorted(set(self.tuning.seeds) & {seed for block in self.grid for seed in block.seed})
            if shared:
                raise ValueError(f"seeds {shared} are both for tuning and for evaluation; take different ones")
            if len(set(self.tuning.seeds)) != len(self.tuning.seeds):
                raise ValueError(f"tuning.seeds holds a value twice: {list(self.tuning.seeds)}")
            for ladder in rates.values():
                _check_ladder("learning_rate", ladder)
                if len(ladder) < 3:
                    raise ValueError("tuning needs at least three learning rates")
            for ladder in dampings.values():
                _check_ladder("damping", ladder)
        elif any(block.learning_rate is None for block in self.grid):
            raise ValueError("rate_from_batch_size takes a tuned learning rate; add a [tuning] table")
        return self

    def cells(self) -> list[Cell]:
        """Every cell that has learning rates of its own, in the file's order."""
        return list(self.rates())

    def rates(self) -> dict[Cell, tuple[float, ...]]:
        """The learning rates of each such cell; where cells are tuned, two blocks that share one must agree on them."""
        return self._values("learning_rate")

    def dampings(self) -> dict[Cell, tuple[float, ...]]:
        """The dampings of each such cell whose method has one; two blocks that share a cell must agree on them."""
        return self._values("damping", DAMPED)

    def _values(self, name: str, methods: Sequence[Method] | None = None) -> dict[Cell, tuple[float, ...]]:
        found: dict[Cell, tuple[float, ...]] = {}
        for block in self.grid:
            values: tuple[float, ...] | None = getattr(block, name)
            if values is None:
                continue
            for cell in block.cells(self.data, self.train_images, self.drop_last):
                if methods is not None and cell.method not in methods:
                    continue
                if found.setdefault(cell, values) != values:
                    raise ValueError(f"two blocks hold {cell} with different {name}; give them the same")
        return found

    def series(self) -> list[Series]:
        """What is tested, in the file's order; a cell that several blocks hold is tested with the seeds of them all."""
        seeds: dict[tuple[Cell, int | None], dict[int, None]] = {}
        for block in self.grid:
            for cell in block.cells(self.data, self.train_images, self.drop_last):
                seeds.setdefault((cell, block.rate_from_batch_size), {}).update(dict.fromkeys(block.seed))
        return [
            Series(cell, replace(cell, batch_size=size or cell.batch_size), tuple(found), size) for (cell, size), found in seeds.items()
        ]


def _check_ladder(name: str, ladder: tuple[float, ...]) -> None:
    if list(ladder) != sorted(ladder):
        raise ValueError(f"{name} must ascend where it is tuned")
    if any(high < CLOSEST * low for low, high in itertools.pairwise(ladder)):
        raise ValueError(f"values of {name} that are tuned differ by 2 % at least from one to the next, got {list(ladder)}")


def read_grid(path: Path) -> tuple[Grid, str]:
    """A grid file, checked, and its text as it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the grid file {path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_grid(text, str(path)), text


def parse_grid(text: str, name: str, *, drop_last: bool = True) -> Grid:
    """A grid file's text, checked; `drop_last` is what it means where it does not say."""
    try:
        grid = Grid.model_validate({"drop_last": drop_last} | tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{name} is not a TOML file: {error}") from error
    except ValidationError as error:
        # A list whose element is wrong is also reported as too short, which is not what is wrong with it.
        items = error.errors()
        told = [item for item in items if item["type"] != "too_short"] or items
        raise BadInputError(f"{name}: {'; '.join(_one_line(item) for item in told)}") from error
    return grid


def grid_of(text: str, name: str, trials: Iterable[Trial]) -> Grid:
    """The grid of a study that has these trials.

    Older grid files do not say drop_last, and their studies trained on the short last minibatch too.
    """
    trials = list(trials)
    return parse_grid(text, name, drop_last=not trials or any(trial.drop_last for trial in trials))


def _one_line(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    if item["type"] == "extra_forbidden":
        fields = {"grid": Axes.model_fields, "tuning": Tuning.model_fields}.get(where.split(".")[0], Grid.model_fields)
        return f"{where} is not a field here; the fields are {', '.join(fields)}"
    if item["type"] == "too_short":
        return f"{where}: wanted at least one value, got none"
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] in {"missing", "value_error"}:
        return f"{where}: {message}" if where else message
    return f"{where}: {message}, got {item['input']!r}"
