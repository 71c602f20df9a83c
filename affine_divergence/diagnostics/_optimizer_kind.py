# How an optimiser's step depends on the scale of a gradient: in proportion, or not at all.
from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from affine_divergence.diagnostics._wrappers import unwrapped


class StepScale(Enum):
    """What a gradient k times as large does to a step: k times the step, or the same one."""

    PROPORTIONAL = "proportional"
    INVARIANT = "invariant"


INVARIANT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop)
_WHY = {
    "LBFGS": "its line search and curvature estimate choose the length of a step",
    "Adagrad": "its rate falls with the sum of all past gradients, so no one factor holds during training",
    "Adadelta": "it estimates the length of a step from the past steps",
    "Rprop": "its step sizes adapt to the signs of past gradients and leave lr behind",
    "Muon": "it makes the update orthogonal, which changes each row's share in it",
    "Adafactor": "it scales steps by the size of the weights",
}


def step_scale(optimizer: Any) -> StepScale:
    """The kind of an optimiser or of a class of optimisers; None is SGD. TypeError for what is neither, ValueError for another kind."""
    if optimizer is None:
        return StepScale.PROPORTIONAL
    inner = optimizer if isinstance(optimizer, type) else unwrapped(optimizer)[0]
    kind = inner if isinstance(inner, type) else type(inner)
    if not issubclass(kind, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or its class, as torch.optim.AdamW, got {kind.__name__}")
    if issubclass(kind, torch.optim.SGD):
        return StepScale.PROPORTIONAL
    if issubclass(kind, INVARIANT):
        return StepScale.INVARIANT
    why = next((why for name, why in _WHY.items() if any(base.__name__ == name for base in kind.__mro__)), "its law of steps is unknown")
    known = ", ".join(["SGD", *(one.__name__ for one in INVARIANT)])
    raise ValueError(
        f"no matching rate is known for {kind.__name__}: {why}. Known are {known}; if it steps as one of these, pass that class. "
        "Else tune the learning rate"
    )
