# What a model's training step does to its activations.
#
# Names are resolved when first used (PEP 562): the lab's figures share their look with those here, and `affdiv --help` needs no torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._diagnose import diagnose as diagnose
    from ._file import load as load
    from ._matching import matching_lr as matching_lr
    from ._monitor import Monitor as Monitor
    from ._records import Diagnosis as Diagnosis

_NAMES = {"Diagnosis": "_records", "Monitor": "_monitor", "diagnose": "_diagnose", "load": "_file", "matching_lr": "_matching"}

__all__ = ["Diagnosis", "Monitor", "diagnose", "load", "matching_lr"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
