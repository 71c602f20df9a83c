# Leaving a model and its optimiser as they were, whatever is done to them in between: values, objects, version counters, random numbers.
from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from affine_divergence.diagnostics._held import Restore, saved, saved_modules

if TYPE_CHECKING:
    from torch import Tensor


class Randomness:
    """The states of the generators of torch, of Python and of numpy, to go back to."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Back to it."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@dataclass(frozen=True)
class Beginning:
    """How it all was at first."""

    randomness: Randomness
    forward: list[Restore]  # what a forward may have changed
    parameters: dict[torch.nn.Parameter, Tensor]  # their values; for nobody to write to

    def again(self) -> None:
        """Buffers, what modules keep, parameters that no optimiser has and random numbers: the next forward is the first one again."""
        with torch.no_grad():
            for restore in self.forward:
                restore()
        self.randomness.restore()


@contextmanager
def untouched(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, loss_fn: Any = None) -> Iterator[Beginning]:
    """The model, an optimiser that may step, and what a loss keeps: after it all is as before it, also after an error.

    In here no parameter has a gradient at first, where there is an optimiser.
    """
    randomness = Randomness()
    stepped = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])) if optimizer is not None else []
    parameters = list(dict.fromkeys([*stepped, *model.parameters()]))
    state = _tensors(vars(optimizer)) if optimizer is not None else []
    with _unsafe_preserve_version_counter((*parameters, *model.buffers(), *state)):
        known: dict[int, Restore] = {}
        values = {p: p.detach().clone() for p in parameters}
        known |= {id(p): functools.partial(p.detach().copy_, value) for p, value in values.items()}
        # A forward may write to parameters too: a momentum encoder, an embedding's max_norm.
        others = saved([p for p in parameters if p not in set(stepped)], known)
        # A bound method's state is its object's.
        at_first = [saved_modules(model, known), others, saved([getattr(loss_fn, "__self__", loss_fn)], known)]
        restores = [*at_first, *([saved(stepped, known), saved(optimizer, known)] if optimizer is not None else [])]
        gradients = [(p, p.grad) for p in parameters]
        if optimizer is not None:
            for p in parameters:
                p.grad = None
        try:
            yield Beginning(randomness, at_first, values)
        finally:
            with torch.no_grad():
                for restore in restores:
                    restore()
            if optimizer is not None:
                for p, gradient in gradients:
                    p.grad = gradient
            randomness.restore()


def _tensors(value: Any) -> list[Tensor]:
    """Those in an optimiser's state, to whatever depth."""
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, torch.nn.Parameter) else [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []
