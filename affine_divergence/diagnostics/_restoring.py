# Leaving a model and its optimiser as they were, whatever is done to them in between: values, objects, version counters, random numbers.
from __future__ import annotations

import functools
import random
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from affine_divergence.diagnostics._held import GENERATORS, Held, attempted, is_foreign, rewrite

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
        if errors:  # what came next would be of another beginning
            raise RuntimeError(_said(errors)) from errors[0]


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
                errors = [error for _, error in attempted(functools.partial(rewrite, p, value) for p, value in values.items())]
                for p, gradient in gradients:
                    p.grad = gradient
                randomness.restore()
                errors += [*held.restore(), *others.restore()]
        if errors:  # the diagnosis is none the worse
            warnings.warn(_said(errors), RuntimeWarning, stacklevel=4)


def _said(errors: Sequence[Exception]) -> str:
    return f"something that the model holds could not be put back to what it was: {errors[0]}"


def _kept_by(loss_fn: Any, seen: frozenset[int] = frozenset()) -> Iterator[Any]:
    """What a loss may write to: an object, its own or that of its method, and the modules and generators that a function names."""
    if id(loss_fn) in seen:
        return
    seen |= {id(loss_fn)}
    if isinstance(loss_fn, functools.partial):
        for one in (loss_fn.func, *loss_fn.args, *loss_fn.keywords.values()):
            yield from _kept_by(one, seen)
    elif isinstance(loss_fn, types.MethodType):
        yield loss_fn.__self__
        yield from _kept_by(loss_fn.__func__, seen)
    elif isinstance(loss_fn, types.FunctionType):
        for one in _named(loss_fn):
            if isinstance(one, (nn.Module, *GENERATORS)):
                yield one
            elif isinstance(one, functools.partial) or (isinstance(one, (types.FunctionType, types.MethodType)) and not is_foreign(one)):
                yield from _kept_by(one, seen)
    else:
        yield loss_fn


def _named(function: types.FunctionType) -> Iterator[Any]:
    """The values of its free variables and of the globals that it names, as far as there are any."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty one
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:  # and of functions that it makes
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _tensors(value: Any) -> list[Tensor]:
    """Those in an optimiser's state, to whatever depth."""
    if isinstance(value, torch.Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in _tensors(one)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []
