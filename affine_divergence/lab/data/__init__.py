# Data sets: named sources, downloaded where asked for, decoded once into a cache, split and standardised.
# The heavy names are resolved when first used (PEP 562): the command line asks for NAMES and parse_source without importing torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._dataset import Dataset as Dataset
from ._names import HOW as HOW, NAMES as NAMES, parse_source as parse_source

if TYPE_CHECKING:
    from ._cache import downloads_folder as downloads_folder
    from ._download import download as download
    from ._load import load as load, locate as locate
    from ._pinned import ARCHIVES as ARCHIVES, Archive as Archive
    from ._rows import split_rows as split_rows
    from ._splits import Part as Part, Splits as Splits, make_splits as make_splits

_LAZY = {
    "ARCHIVES": "_pinned",
    "Archive": "_pinned",
    "Part": "_splits",
    "Splits": "_splits",
    "download": "_download",
    "downloads_folder": "_cache",
    "load": "_load",
    "locate": "_load",
    "make_splits": "_splits",
    "split_rows": "_rows",
}

__all__ = ["HOW", "NAMES", "Dataset", "parse_source", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
