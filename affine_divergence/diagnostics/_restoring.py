# Leaving a model and its optimiser as they were, whatever is done to them in between: values, objects, version counters, random numbers.
from __future__ import annotations

import functools
import itertools
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
    modules: Restore
    parameters: dict[torch.nn.Parameter, Tensor]  # values of those that the optimiser may change; for nobody to write to

    def again(self) -> None:
        """Buffers, what modules keep besides parameters, and random numbers as at first: the next forward is the first one again."""
        with torch.no_grad():
            self.modules()
        self.randomness.restore()


@contextmanager
def untouched(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Beginning]:
    """The model in any case, its parameters if an optimiser may step: after it all is as before it, also after an error.

    With an optimiser no parameter has a gradient at first.
    """
    randomness = Randomness()
    parameters = list(model.parameters())
    if optimizer is not None:
        parameters = list(dict.fromkeys([*parameters, *(p for group in optimizer.param_groups for p in group["params"])]))
    with _unsafe_preserve_version_counter((*parameters, *model.buffers())):
        saved: dict[int, Restore] = {}
        modules = _modules(model, saved)
        restores = [modules]
        gradients = [(p, p.grad) for p in parameters]
        values = {}
        if optimizer is not None:
            values = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
            saved |= {id(p): functools.partial(p.detach().copy_, value) for p, value in values.items()}
            restores.append(_saved([*values], saved))
            restores.append(_saved(vars(optimizer), saved))
            for p in parameters:
                p.grad = None
        try:
            yield Beginning(randomness, modules, values)
        finally:
            with torch.no_grad():
                for restore in restores:
                    restore()
            if optimizer is not None:
                for p, gradient in gradients:
                    p.grad = gradient
            randomness.restore()


_OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))  # hooks, and the registries


def _modules(model: torch.nn.Module, saved: dict[int, Restore]) -> Restore:
    """Of every module its attributes, what lists and dicts among them hold and, by value, its buffers and other tensors; no parameters."""
    restores = []
    for module in model.modules():
        own = dict(vars(module))
        registries = [(registry, dict(registry)) for registry in (module._parameters, module._buffers, module._modules)]
        values = [v for v in itertools.chain(own.values(), module._buffers.values()) if isinstance(v, (torch.Tensor, RunningMoment))]
        kept = [(v, v.copy()) for name, v in own.items() if isinstance(v, (list, dict)) and name not in _OF_ANY_MODULE]
        restores.append((module, own, registries, kept, _saved(values, saved)))

    def restore() -> None:
        for module, own, registries, kept, restore_values in restores:
            _refill(vars(module), own)
            for held, content in kept:
                _refill(held, content)
            for registry, before in registries:
                _refill(registry, before)
            restore_values()

    return restore


def _saved(value: Any, saved: dict[int, Restore]) -> Restore:
    """How to have a value back, in the same objects: tensors, and dicts and lists down to them."""
    if id(value) not in saved:
        saved[id(value)] = lambda: value  # one that holds itself; and it must live as long as its number stands for it
        saved[id(value)] = _restore(value, saved)
    return saved[id(value)]


def _restore(value: Any, saved: dict[int, Restore]) -> Restore:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, RunningMoment):
        return _saved(vars(value), saved)
    content = dict(value) if isinstance(value, dict) else list(value)
    inner = [_saved(v, saved) for v in (content.values() if isinstance(content, dict) else content) if isinstance(v, _HELD)]

    def restore() -> None:
        if not isinstance(value, tuple):
            _refill(value, content)
        for again in inner:
            again()

    return restore


_HELD = (torch.Tensor, dict, list, tuple)


def _tensor(tensor: Tensor) -> Restore:
    before = tensor.detach().clone()

    def restore() -> None:
        if not torch.equal(tensor, before):  # a buffer that is an expanded view can be read, not written
            tensor.detach().copy_(before)

    return restore


def _refill(held: Any, before: Any) -> None:
    """The content of a list or a dict as it was."""
    if isinstance(held, list):
        held[:] = before
    elif held.keys() != before.keys() or any(held[key] is not value for key, value in before.items()):
        held.clear()
        held.update(before)
