# Names as they can be shown: what no terminal, page or file should get raw is written out, as \n and \x1b are.
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from affine_divergence.diagnostics._records import Diagnosis


def visible(text: str) -> str:
    r"""The text with everything escaped that is not printable: line breaks, escape sequences, letters without a width, lone surrogates.

    >>> print(visible("blocks.\x1b[31m\n"))
    blocks.\x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def shown(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with every text in it visible: names of modules and types are whatever a model's author wrote."""
    changed: dict[str, Any] = {"about": _of_any(diagnosis.about)}
    for name, value in vars(diagnosis).items():
        if isinstance(value, (tuple, list)):
            changed[name] = tuple(map(_of_record, value))
    return dataclasses.replace(diagnosis, **changed)


def _of_record(record: Any) -> Any:
    texts = {name: value for name, value in vars(record).items() if isinstance(value, str) and not value.isprintable()}
    return dataclasses.replace(record, **{name: visible(value) for name, value in texts.items()}) if texts else record


def _of_any(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): _of_any(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_of_any(one) for one in value]
    return value
