"""Layers, corrections and experiments for the affine divergence (G. Bird, arXiv 2512.22247)."""
# Names are resolved when first used (PEP 562): the command line starts without importing torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from affine_divergence import functional as functional, gradient as gradient, nn as nn
    from affine_divergence.diagnostics import matching_lr as matching_lr

__version__ = "0.1.0"

_MODULES = ("functional", "gradient", "nn")
_NAMES = {"matching_lr": "diagnostics"}

__all__ = ["functional", "gradient", "matching_lr", "nn"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
