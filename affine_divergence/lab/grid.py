# Grid files: which trials a study is made of, and how its learning rates are tuned.
from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.trial import Activation, Cell, Method, PositiveFloat, PositiveInt, Seed

MAX_TRIALS = 1_000_000


class Axes(BaseModel):
    """The values whose product is the grid; a single value may stand without brackets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Annotated[tuple[Method, ...], Field(min_length=1)]
    width: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    depth: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    activation: Annotated[tuple[Activation, ...], Field(min_length=1)]
    batch_size: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    learning_rate: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    seed: Annotated[tuple[Seed, ...], Field(min_length=1)]
    epochs: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value if isinstance(value, list | tuple) else [value] for name, value in values.items()}

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        for name, values in self:
            if values is not None and len(set(values)) != len(values):
                raise ValueError(f"{name} holds a value twice: {list(values)}")
        return self


class Tuning(BaseModel):
    """Two-stage tuning: every `stride`-th rate with the first seed, then the best one's neighbours with every seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    stride: PositiveInt = 2
    extend: Annotated[int, Field(ge=0, le=10, strict=True)] = 2


class Grid(BaseModel):
    """A study's grid file, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    data: Annotated[str, Field(min_length=1)]
    grid: Axes
    tuning: Tuning | None = None

    @model_validator(mode="after")
    def _tunable(self) -> Self:
        if self.tuning is not None:
            shared = sorted(set(self.tuning.seeds) & set(self.grid.seed))
            if shared:
                raise ValueError(f"seeds {shared} are both for tuning and for evaluation; take different ones")
            if len(set(self.tuning.seeds)) != len(self.tuning.seeds):
                raise ValueError(f"tuning.seeds holds a value twice: {list(self.tuning.seeds)}")
            if list(self.grid.learning_rate) != sorted(self.grid.learning_rate):
                raise ValueError("learning_rate must ascend where it is tuned")
            if len(self.grid.learning_rate) < 3:
                raise ValueError("tuning needs at least three learning rates")
        return self

    def cells(self) -> list[Cell]:
        """Every combination of the axes but learning rate and seed, in the file's order."""
        axes = self.grid
        budgets = [(epochs, None) for epochs in axes.epochs or ()] + [(None, steps) for steps in axes.steps or ()]
        product = itertools.product(axes.width, axes.depth, axes.activation, axes.batch_size, budgets, axes.method)
        return [
            Cell(self.data, method, width, depth, activation, batch_size, epochs, steps)
            for width, depth, activation, batch_size, (epochs, steps), method in product
        ]


def read_grid(path: Path) -> tuple[Grid, str]:
    """A grid file, checked, and its text as it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read the grid file {path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_grid(text, str(path)), text


def parse_grid(text: str, name: str) -> Grid:
    try:
        grid = Grid.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{name} is not a TOML file: {error}") from error
    except ValidationError as error:
        # A list whose element is wrong is also reported as too short, which is not what is wrong with it.
        items = error.errors()
        told = [item for item in items if item["type"] != "too_short"] or items
        raise BadInputError(f"{name}: {'; '.join(_one_line(item) for item in told)}") from error
    count = len(grid.cells()) * len(grid.grid.learning_rate) * len(grid.grid.seed)
    if count > MAX_TRIALS:
        raise BadInputError(f"{name} asks for {count:,} trials; at most {MAX_TRIALS:,} go into one study")
    return grid


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
