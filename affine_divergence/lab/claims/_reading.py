# The text of the claims, read: what each claim compares, and where.
from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from affine_divergence.lab.claims._protocol import Protocol
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.pattern import Pattern
from affine_divergence.lab.trial import Activation, Method, PositiveFloat, PositiveInt, check_methods

Estimand = Literal["lead", "above-chance", "trend-of-lead", "batch-slope", "parity", "interior-signal"]
Direction = Literal["greater", "less"]
Points = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Cells(BaseModel):
    """The product of some axes; the learning rates are those tuned for each cell, or for its like at another batch size.

    Without a pattern they are fully-connected nets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    activation: Annotated[tuple[Activation, ...], Field(min_length=1)]
    depth: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    width: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    pattern: Annotated[tuple[Pattern, ...], Field(min_length=1)] | None = None
    batch_size: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    rate_from_batch_size: PositiveInt | None = None
    signal: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for name, values in self:
            if isinstance(values, tuple) and len(set(values)) != len(values):
                raise ValueError(f"{name} holds a value twice: {list(values)}")
        return self


class Part(BaseModel):
    """An estimand for one method over some settings; with `verdict = false` it is shown and decides nothing.

    With `needs_training = false` an accuracy near chance counts as a result, which a claim about failure is about.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimand: Estimand
    along: Literal["width", "depth"] | None = None
    method: Method
    rivals: tuple[Method, ...]
    direction: Direction | None = None
    margin: Points
    chance: Points | None = None
    verdict: bool = True
    needs_training: bool = True
    cells: Annotated[tuple[Cells, ...], Field(min_length=1)]

    @property
    def claims_nothing(self) -> bool:
        """Whether it is a lead that is shown without a direction."""
        return self.estimand == "lead" and self.direction is None and not self.verdict

    @property
    def axis(self) -> Literal["width", "depth", "batch_size", "signal"] | None:
        """What the settings of a unit differ in; None where a unit is one setting, or their mean."""
        return {"batch-slope": "batch_size", "interior-signal": "signal"}.get(self.estimand, self.along)  # type: ignore[return-value]

    @property
    def sign(self) -> int:
        """1 where a greater value is claimed, −1 where a smaller one is."""
        return -1 if self.direction == "less" else 1

    @property
    def alone(self) -> bool:
        """Whether the method is compared with no other method."""
        return self.estimand in ("above-chance", "interior-signal")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if (self.estimand == "trend-of-lead") != (self.along is not None):
            raise ValueError("along goes with trend-of-lead and with nothing else")
        if (self.estimand == "above-chance") != (self.chance is not None):
            raise ValueError("chance goes with above-chance and with nothing else")
        if self.alone != (not self.rivals):
            raise ValueError("above-chance and interior-signal have no rivals, every other estimand has at least one")
        if self.direction is not None and self.estimand == "parity":
            raise ValueError("parity claims no direction; leave it out")
        if self.direction is None and not self.claims_nothing and self.estimand != "parity":
            raise ValueError('give direction = "greater" or "less"; only parity, and a lead that decides nothing, are without')
        if self.estimand == "parity" and not self.margin > 0.0:
            raise ValueError("parity is within a margin; give one above 0")
        if self.method in self.rivals or len(set(self.rivals)) != len(self.rivals):
            raise ValueError(f"rivals are different methods, and other ones than {self.method}; got {list(self.rivals)}")
        if any((cells.signal is not None) != (self.estimand == "interior-signal") for cells in self.cells):
            raise ValueError("signal goes with interior-signal and with nothing else")
        least = 3 if self.estimand == "interior-signal" else 2
        if self.axis is not None and any(len(getattr(cells, self.axis)) < least for cells in self.cells):
            raise ValueError(f"a comparison along {self.axis} needs at least {['two', 'three'][least - 2]} values of it")
        for cells in self.cells:
            for pattern in cells.pattern or (None,):
                check_methods([self.method, *self.rivals], pattern)
        return self


class Claim(BaseModel):
    """A statement of the paper, and the parts that test it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    statement: Annotated[str, Field(min_length=1)]
    part: Annotated[tuple[Part, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if not any(part.verdict for part in self.part):
            raise ValueError("no part decides; at least one must be without verdict = false")
        return self


class Claims(BaseModel):
    """A file of claims, checked; `level` bounds each kind of wrong verdict, reproduced and contradicted, of a claim."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1, 2, 4]  # 1 knew neither parity nor patterns; protocols and verdicts by tendency came with 4
    level: Annotated[float, Field(gt=0.0, lt=0.5)]
    protocol: tuple[Protocol, ...] = ()
    claim: Annotated[tuple[Claim, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _sound(self) -> Self:
        ids = [claim.id for claim in self.claim]
        if len(set(ids)) != len(ids):
            raise ValueError(f"two claims have one id: {ids}")
        if (self.version >= 4) != bool(self.protocol):
            raise ValueError("version 4 needs at least one protocol, and earlier versions have none")
        names = [protocol.name for protocol in self.protocol]
        if len(set(names)) != len(names):
            raise ValueError(f"two protocols have one name: {names}")
        for protocol in self.protocol:
            if unknown := set(protocol.claims) - set(ids):
                raise ValueError(f"the protocol {protocol.name} names unknown claims: {sorted(unknown)}")
        return self

    def named(self, ids: Sequence[str]) -> list[Claim]:
        """The claims with these ids, in the text's order."""
        known = [claim.id for claim in self.claim]
        if unknown := [name for name in ids if name not in known]:
            raise BadInputError(
                f"the grid file names the claims {', '.join(unknown)}, the known ones are {', '.join(known)}; correct the grid file"
            )
        return [claim for claim in self.claim if claim.id in ids]

    def judged_by(self, claims: Sequence[str], protocols: Sequence[str]) -> list[tuple[Claim, Protocol | None]]:
        """The claims with these ids under each of the protocols that is for them; under none before version 4."""
        named = self.named(claims)
        known = [protocol.name for protocol in self.protocol]
        if unknown := [name for name in protocols if name not in known]:
            there = f"the known ones are {', '.join(known)}" if known else "the study's claims have none"
            raise BadInputError(f"the grid file names the protocols {', '.join(unknown)}; {there}; correct the grid file")
        if not self.protocol:
            return [(claim, None) for claim in named]
        pairs: list[tuple[Claim, Protocol | None]] = [
            (claim, protocol) for claim in named for protocol in self.protocol if protocol.name in protocols and claim.id in protocol.claims
        ]
        if missing := [claim.id for claim in named if all(one is not claim for one, _ in pairs)]:
            raise BadInputError(
                f"the claims {', '.join(missing)} are judged under protocols: name one that is for them in the grid file, "
                f"as in protocols = [{', '.join(map(repr, self._protocols_of(missing[0])))}]".replace("'", '"')
            )
        return pairs

    def _protocols_of(self, claim: str) -> list[str]:
        return [protocol.name for protocol in self.protocol if claim in protocol.claims]


def claims_text() -> str:
    """The text of the claims that this version tests."""
    return (resources.files("affine_divergence.lab.claims") / "claims.toml").read_text(encoding="utf-8")


def claims_digest(text: str) -> str:
    """The hash by which a text of claims is named: SHA-256, its first 16 digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse_claims(text: str, name: str = "the claims") -> Claims:
    """Claims from their text; BadInputError names the claim, the part and the field that is wrong."""
    try:
        values = tomllib.loads(text)
        return Claims.model_validate(values)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{name} are not a TOML file: {error}") from error
    except ValidationError as error:
        raise BadInputError(f"{name}: {'; '.join(_one_line(item, values) for item in error.errors())}") from error


def _one_line(item: Any, values: Any) -> str:
    where = []
    for before, part in zip((None, *item["loc"]), item["loc"], strict=False):
        if isinstance(part, int):
            where.append(_claim_name(values, part) if before == "claim" else str(part + 1))
        elif part != "claim":
            where.append(str(part))
    place = " ".join(where)
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if item["type"] in {"missing", "value_error", "extra_forbidden"}:
        return f"{place}: {message}" if place else message
    return f"{place}: {message}, got {item['input']!r}"


def _claim_name(values: Any, index: int) -> str:
    claim = values["claim"][index]
    return str(claim.get("id", index + 1)) if isinstance(claim, dict) else str(index + 1)
