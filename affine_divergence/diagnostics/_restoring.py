# Leaving a model and its optimiser as they were, whatever is done to them in between: values, objects, version counters, random numbers.
from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from affine_divergence.gradient._average import RunningMoment

if TYPE_CHECKING:
    from torch import Tensor

Restore = Callable[[], Any]


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
def untouched(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Beginning]:
    """The model, and an optimiser that may step: after it all is as before it, also after an error.

    In here no parameter has a gradient at first, where there is an optimiser.
    """
    randomness = Randomness()
    stepped = list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])) if optimizer is not None else []
    parameters = list(dict.fromkeys([*stepped, *model.parameters()]))
    state = _tensors(vars(optimizer)) if optimizer is not None else []
    with _unsafe_preserve_version_counter((*parameters, *model.buffers(), *state)):
        saved: dict[int, Restore] = {}
        values = {p: p.detach().clone() for p in parameters}
        saved |= {id(p): functools.partial(p.detach().copy_, value) for p, value in values.items()}
        # A forward may write to parameters too: a momentum encoder, an embedding's max_norm.
        others = _saved([p for p in parameters if p not in set(stepped)], saved)
        modules = _modules(model, saved)
        at_first = [modules, others]
        restores = [*at_first, *([_saved(stepped, saved), _saved(optimizer, saved)] if optimizer is not None else [])]
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


_OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))  # hooks, and the registries


def _modules(model: torch.nn.Module, saved: dict[int, Restore]) -> Restore:
    """Of every module its attributes with what containers among them hold, and its buffers; not its parameters' values."""
    restores: list[Restore] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # whose attributes are C++'s
            restores.append(_saved(list(module.buffers(recurse=False)), saved))
            continue
        own = dict(vars(module))
        held = [value for name, value in own.items() if isinstance(value, _HELD) and name not in _OF_ANY_MODULE]
        restores.append(functools.partial(_refill, vars(module), own))
        restores += [functools.partial(_refill, registry, dict(registry)) for registry in _registries(module)]
        restores += [_saved(value, saved) for value in (*held, *module._buffers.values()) if value is not None]

    def restore() -> None:
        for one in restores:
            one()

    return restore


def _registries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _saved(value: Any, saved: dict[int, Restore]) -> Restore:
    """How to have a value back, in the same objects: tensors, containers down to them, optimisers inside optimisers."""
    if id(value) not in saved:
        saved[id(value)] = lambda: value  # one that holds itself; and it must live as long as its number stands for it
        saved[id(value)] = _restore(value, saved)
    return saved[id(value)]


def _restore(value: Any, saved: dict[int, Restore]) -> Restore:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.ndarray):
        return functools.partial(np.copyto, value, value.copy())
    if isinstance(value, (RunningMoment, torch.optim.Optimizer)):
        return _saved(vars(value), saved)
    content = copy.copy(value)
    inner = [_saved(v, saved) for v in (content.values() if isinstance(content, dict) else content) if isinstance(v, _HELD)]

    def restore() -> None:
        _refill(value, content)
        for again in inner:
            again()

    return restore


_HELD = (
    *(torch.Tensor, torch.Generator, np.ndarray, RunningMoment, torch.optim.Optimizer),
    *(dict, list, tuple, set, collections.deque),
)


def _tensor(tensor: Tensor) -> Restore:
    if tensor.layout != torch.strided:  # which cannot be compared
        return functools.partial(tensor.copy_, tensor.detach().clone())
    before = tensor.detach().clone()

    def restore() -> None:
        if not torch.equal(tensor, before):  # a buffer that is an expanded view can be read, not written
            tensor.detach().copy_(before)

    return restore


def _refill(held: Any, before: Any) -> None:
    """The content of a container as it was."""
    if isinstance(held, list):
        held[:] = before
    elif isinstance(held, collections.deque):
        held.clear()
        held.extend(before)
    elif isinstance(held, (set, dict)) and not _same(held, before):
        held.clear()
        held.update(before)


def _same(held: Any, before: Any) -> bool:
    if isinstance(held, set):
        return bool(held == before)
    return held.keys() == before.keys() and all(held[key] is value for key, value in before.items())
