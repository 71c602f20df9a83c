# Diagnoses as JSON lines: written whole or one after another, read as a stream.
#
# A line is one object: {"record": "row", "step": 100, …} with the fields of the record. The first line of a diagnosis is its "about" with
# the format and how many lines follow, so that one that a killed run left half written is known. NaN is null, an infinity "inf" or "-inf".
from __future__ import annotations

import json
import math
import os
import secrets
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from affine_divergence.diagnostics._records import Check, Counterfactual, Coverage, Diagnosis, LossChange, Row, Samples, Step

FORMAT = 1
RECORDS: dict[str, type[Any]] = {
    "coverage": Coverage,
    "row": Row,
    "check": Check,
    "loss": LossChange,
    "counterfactual": Counterfactual,
    "step": Step,
    "samples": Samples,
}
_NAMES = {record: name for name, record in RECORDS.items()}
_HINTS = {name: typing.get_type_hints(record) for name, record in RECORDS.items()}
_START = b'{"record": "about", '
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}


def save(diagnoses: Sequence[Diagnosis], path: str | os.PathLike[str]) -> None:
    """Write the diagnoses; what was at the path is there until all is written, and then gone."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            for one in diagnoses:
                file.write(_written(one))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def append(diagnosis: Diagnosis, path: str | os.PathLike[str]) -> None:
    """Write the diagnosis after those that are there, in one write; a line that a killed run left cut short is taken away first.

    Raises:
        ValueError: there is a file that holds no diagnoses.
    """
    path = Path(path)
    if path.exists():
        _mend(path)
    with path.open("ab") as file:
        file.write(_written(diagnosis))


def load(path: str | os.PathLike[str]) -> list[Diagnosis]:
    """The diagnoses of a file, in its order: those of `Diagnosis.save` or of a `Monitor`.

    One that a killed run left half written is left out. A tuple in `about` comes back as a list.

    Raises:
        ValueError: a line is no record of a diagnosis, or the file is of a format that this version doesn't read.

    >>> import tempfile
    >>> from affine_divergence.diagnostics._records import Diagnosis
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Diagnosis(step=100, about={"model": "Net"}, coverage=(), rows=()).save(f"{folder}/steps.jsonl")
    ...     [(one.step, one.about["model"]) for one in load(f"{folder}/steps.jsonl")]
    [(100, 'Net')]
    """
    with Path(path).open("rb") as file:
        return list(_diagnoses(enumerate(file, start=1), path))


def _written(diagnosis: Diagnosis) -> bytes:
    records = [*diagnosis.coverage, *diagnosis.rows, *diagnosis.checks, *([diagnosis.loss] if diagnosis.loss else [])]
    records += [*diagnosis.counterfactual, *diagnosis.steps, *diagnosis.samples]
    first = {"record": "about", "step": diagnosis.step, "format": FORMAT, "lines": len(records), "about": diagnosis.about}
    rest = ({"record": _NAMES[type(one)], "step": diagnosis.step} | vars(one) for one in records)
    return "".join(json.dumps(_plain(line), allow_nan=False) + "\n" for line in (first, *rest)).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def _mend(path: Path) -> None:
    with path.open("r+b") as file:
        if not _START.startswith(file.read(len(_START))):
            raise ValueError(f"{path} holds no diagnoses, so none is written after what it holds; name another file")
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        text = file.read()
        kept = text.rfind(b"\n") + 1
        if _parsed(text[kept:]) is None:
            file.truncate(kept)
        else:
            file.write(b"\n")


def _diagnoses(lines: Iterable[tuple[int, bytes]], path: str | os.PathLike[str]) -> Iterator[Diagnosis]:
    begun: dict[str, Any] | None = None
    found: dict[str, list[Any]] = {}
    for number, line in lines:
        value = _parsed(line)
        if value is None and not line.endswith(b"\n"):
            return  # the last one, cut short
        try:
            if value is None:
                raise ValueError("not a JSON object")
            name = value.pop("record", None)
            if name == "about":
                begun, found = _about(value), {known: [] for known in RECORDS}
            elif not isinstance(name, str) or name not in RECORDS:
                raise ValueError(f"wanted a record that is one of about, {', '.join(RECORDS)}, got {name!r}")
            elif begun is None or value.pop("step", None) != begun["step"] or begun["lines"] == 0:
                raise ValueError("it is none of the lines that the about line before it announces")
            else:
                found[name].append(_record(name, value))
                begun["lines"] -= 1
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if begun["lines"] == 0:
            yield Diagnosis(
                step=begun["step"],
                about=begun["about"],
                coverage=tuple(found["coverage"]),
                rows=tuple(found["row"]),
                checks=tuple(found["check"]),
                loss=found["loss"][-1] if found["loss"] else None,
                counterfactual=tuple(found["counterfactual"]),
                steps=tuple(found["step"]),
                samples=tuple(found["samples"]),
            )


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or nested without end
        return None
    return value if isinstance(value, dict) else None


def _about(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("format") != FORMAT:
        raise ValueError(f"wanted format {FORMAT}, got {value.get('format')!r}; a newer affine-divergence wrote the file: update this one")
    read = _fields(value, {"step": int, "format": int, "lines": int, "about": dict}, "about")
    if read["lines"] < 0:
        raise ValueError(f"lines of the about record: wanted how many follow, got {read['lines']}")
    return read


def _record(name: str, value: dict[str, Any]) -> Any:
    later = {field.name: _plain(field.default) for field in fields(RECORDS[name]) if field.default is not MISSING}  # than older files
    return RECORDS[name](**_fields(later | value, _HINTS[name], name))


def _fields(value: dict[str, Any], hints: Mapping[str, Any], name: str) -> dict[str, Any]:
    lacking, unknown = [key for key in hints if key not in value], [key for key in value if key not in hints]
    if lacking or unknown:
        said = [f"{what} {', '.join(keys)}" for what, keys in (("lacks", lacking), ("has the unknown", unknown)) if keys]
        raise ValueError(f"the {name} record {' and '.join(said)}; write the file anew, or read it with the version that wrote it")
    read = {}
    for key, hint in hints.items():
        try:
            read[key] = _read(value[key], hint)
        except _UnfitError:
            raise ValueError(f"{key} of the {name} record: wanted {_wanted(hint)}, got {json.dumps(value[key])[:80]}") from None
    return read


class _UnfitError(Exception):
    """A value is not of the type that the record's field has."""


def _read(value: Any, hint: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _read(value, inner[0])
    if origin is tuple and isinstance(value, list):
        return tuple(_read(one, inner[0]) for one in value)
    if hint is float:
        if value is None:
            return math.nan
        if isinstance(value, str) and value in _INFINITIES:
            return _INFINITIES[value]
        if type(value) is float or _whole(value):
            return float(value)
    elif hint is int:
        if _whole(value):
            return value
    elif value in inner if origin is typing.Literal else type(value) is hint:
        return value
    raise _UnfitError


def _whole(value: Any) -> bool:
    # Of 64 bits, which neither a float nor a DataFrame overflows at.
    return type(value) is int and -(2**63) <= value < 2**63


def _wanted(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return f"{_wanted(inner[0])} or null"
    if origin is tuple:
        return f"a list, each {_wanted(inner[0])}"
    if origin is typing.Literal:
        return f"one of {', '.join(inner)}"
    names = {float: 'a number, null, "inf" or "-inf"', int: "a whole number of 64 bits", str: "text", bool: "true or false"}
    return names.get(hint, "an object")
