# Leaving a model and its optimiser as they were, whatever is done to them in between: values, objects, version counters, random numbers.
from __future__ import annotations

import functools
import inspect
import random
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from affine_divergence.diagnostics._held import Held, attempted, rewrite

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
    held: Held  # what a forward may have changed
    parameters: tuple[nn.Parameter, ...]  # of the model and the optimiser
    values: dict[nn.Parameter, Tensor]  # of those that the optimiser has; for nobody to write to

    def again(self) -> None:
        """Buffers, what modules keep, parameters that no optimiser has and random numbers: the next forward is the first one again."""
        with torch.no_grad():
            errors = self.held.restore()
        self.randomness.restore()
        _raise(errors)


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, loss_fn: Any = None) -> Iterator[Beginning]:
    """The model, an optimiser that may step, and what a loss keeps: after it all is as before it, also after an error.

    In here no parameter has a gradient at first, where there is an optimiser.
    """
    randomness = Randomness()
    stepped = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])) if optimizer is not None else []
    parameters = tuple(dict.fromkeys([*stepped, *model.parameters()]))
    state = _tensors(vars(optimizer)) if optimizer is not None else []
    with _unsafe_preserve_version_counter(tuple(t for t in (*parameters, *model.buffers(), *state) if not t.is_inference())):
        values = {p: p.detach().clone() for p in stepped}
        held = Held(apart=stepped)
        held.look(model, *_kept_by(loss_fn))
        others = held.of_optimizers(*([optimizer] if optimizer is not None else []))
        gradients = [(p, p.grad) for p in parameters] if optimizer is not None else []
        for p, _ in gradients:
            p.grad = None
        try:
            yield Beginning(randomness, held, parameters, values)
        finally:
            with torch.no_grad():
                errors = attempted(functools.partial(rewrite, p, value) for p, value in values.items())
                for p, gradient in gradients:
                    p.grad = gradient
                randomness.restore()
                errors += [*held.restore(), *others.restore()]
        _raise(errors)


def _raise(errors: Sequence[Exception]) -> None:
    if errors:
        raise RuntimeError(f"something that the model holds could not be put back to what it was: {errors[0]}") from errors[0]


def _kept_by(loss_fn: Any) -> Iterator[Any]:
    """What a loss may write to: itself, as a module or an object; the modules of a method's object, and those that a function names."""
    if isinstance(loss_fn, functools.partial):
        for one in (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()):
            yield from _kept_by(one)
    elif isinstance(loss_fn, types.MethodType):
        own = loss_fn.__self__
        yield from _modules([own, *vars(own).values()] if hasattr(own, "__dict__") else [])
        yield from _kept_by(loss_fn.__func__)
    elif isinstance(loss_fn, types.FunctionType):
        named = inspect.getclosurevars(loss_fn)
        yield from _modules([*named.nonlocals.values(), *named.globals.values()])
    else:
        yield loss_fn


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    return (value for value in values if isinstance(value, nn.Module))


def _tensors(value: Any) -> list[Tensor]:
    """Those in an optimiser's state, to whatever depth."""
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []
