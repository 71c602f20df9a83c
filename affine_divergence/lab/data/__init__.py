# Data sets: named sources, decoded once into a cache, split and standardised.
# The heavy names are resolved when first used (PEP 562): the command line asks for NAMES and parse_source without importing torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._dataset import Dataset as Dataset
from ._names import NAMES as NAMES, parse_source as parse_source

if TYPE_CHECKING:
    from ._load import load as load
    from ._splits import Part as Part, Splits as Splits, make_splits as make_splits

_LAZY = {"load": "_load", "Part": "_splits", "Splits": "_splits", "make_splits": "_splits"}

__all__ = ["NAMES", "Dataset", "Part", "Splits", "load", "make_splits", "parse_source"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
