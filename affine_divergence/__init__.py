"""Layers, corrections and experiments for the affine divergence (G. Bird, arXiv 2512.22247)."""
# Names are resolved when first used (PEP 562): the command line starts without importing torch.
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from affine_divergence import diagnostics as diagnostics, functional as functional, gradient as gradient, init as init, nn as nn
    from affine_divergence.diagnostics import Monitor as Monitor, diagnose as diagnose, matching_lr as matching_lr
    from affine_divergence.init import param_groups as param_groups

__version__ = "0.1.0"

_MODULES = ("diagnostics", "functional", "gradient", "init", "nn")
_NAMES = {"Monitor": "diagnostics", "diagnose": "diagnostics", "matching_lr": "diagnostics", "param_groups": "init"}

__all__ = ["Monitor", "diagnose", "diagnostics", "functional", "gradient", "init", "matching_lr", "nn", "param_groups"]


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
