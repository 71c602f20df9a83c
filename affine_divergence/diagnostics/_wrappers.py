# The optimiser inside of others that hold it: the one whose step hooks torch runs.
from __future__ import annotations

from typing import Any

import torch


def unwrapped(optimizer: Any) -> tuple[Any, Any]:
    """The optimiser whose step is taken, and the gradient scaler of a wrapper around it, None if none has one.

    Wrappers are what hold it as `.optimizer` and run no hooks of their own, as accelerate's and Lightning's; an optimiser that was
    initialised as one has hooks and a change of its own, whatever it holds, and is left as it is.
    """
    scaler = None
    while not runs_hooks(optimizer) and hasattr(optimizer, "optimizer"):
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = optimizer.optimizer
    return optimizer, scaler


def runs_hooks(optimizer: Any) -> bool:
    """Whether it was initialised as a torch.optim.Optimizer, which makes the place of its hooks."""
    return "_optimizer_step_pre_hooks" in getattr(optimizer, "__dict__", {})


def held_by(optimizer: Any) -> str:
    """What it holds that may be meant instead, as code, behind a colon; empty if nothing is found."""
    names = [name for name, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, torch.optim.Optimizer)]
    return f": {' or '.join(f'optimizer.{name}' for name in names)}" if names else ""
