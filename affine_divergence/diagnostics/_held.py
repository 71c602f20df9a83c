# How to have back what a model or a loss holds, in the same objects: tensors, arrays, generators, containers, modules, plain objects.
#
# Everything that can be reached is looked at once and gives one restore of its own content alone, so that their order does not matter.
from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Restore = Callable[[], Any]
_LARGEST = 2**26  # bytes of tensors and arrays that plain objects hold; what is above is data, and is not copied


class Held:
    """What was looked at, as it was then; optimisers are met, not looked at, and no tensor is that shares memory with those apart."""

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart if tensor.layout == torch.strided} - {0}
        self._seen: dict[int, Any] = {}  # by its number, for which it must live
        self._restores: list[Restore] = []
        self._copied = 0

    def look(self, *values: Any) -> None:
        """At values and all that they hold."""
        left = [(value, False) for value in values]  # and whether a plain object holds it
        while left:
            value, plain = left.pop()
            if id(value) in self._seen or not _holds(value):
                continue
            self._seen[id(value)] = value
            left += [(one, plain or _is_plain(value)) for one in self._at(value, plain)]

    def of_optimizers(self, *optimizers: torch.optim.Optimizer) -> Held:
        """What these hold and those that were met, and whatever was not looked at yet."""
        found = Held()
        found._apart, found._seen = self._apart, self._seen
        left = [*optimizers, *self.optimizers]
        while left:
            found.look(vars(left.pop()))
            left += found.optimizers
            found.optimizers.clear()
        return found

    def restore(self) -> list[Exception]:
        """What went wrong."""
        return attempted(self._restores)

    def _at(self, value: Any, plain: bool) -> Iterator[Any]:
        """Keeps what a value holds, and goes on to that."""
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, torch.jit.ScriptModule):  # whose attributes are C++'s
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, nn.Module):
            registries = value._parameters, value._buffers, value._modules
            for registry in registries:
                self._restores.append(functools.partial(_refill, registry, dict(registry)))
                yield from registry.values()
            self._restores.append(functools.partial(_refill, vars(value), dict(vars(value))))
            yield from (one for name, one in vars(value).items() if name not in _OF_ANY_MODULE)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._keep(value, plain)
        elif isinstance(value, _GENERATORS):
            self._restores += _generator(value)
        else:
            content = value if isinstance(value, _CONTAINERS) else vars(value)
            before: Any = dict(content) if isinstance(content, dict) else list(content)
            if not isinstance(content, tuple):
                self._restores.append(functools.partial(_refill, content, before))
            yield from before.values() if isinstance(before, dict) else before

    def _keep(self, value: Tensor | np.ndarray[Any, Any], plain: bool) -> None:
        if plain:
            self._copied += value.nbytes
            if self._copied > _LARGEST:
                return
        if isinstance(value, np.ndarray):
            self._restores += [functools.partial(np.copyto, value, value.copy())] if value.flags.writeable else []
        elif value.layout != torch.strided:  # which cannot be compared
            self._restores.append(functools.partial(value.copy_, value.detach().clone()))
        elif not value.is_meta and value.untyped_storage().data_ptr() not in self._apart:
            self._restores.append(functools.partial(rewrite, value, value.detach().clone()))


def attempted(restores: Iterable[Restore]) -> list[Exception]:
    """Each, whatever becomes of the others; what went wrong."""
    errors = []
    for restore in restores:
        try:
            restore()
        except Exception as error:
            errors.append(error)
    return errors


def rewrite(tensor: Tensor, before: Tensor) -> None:
    """Where it has changed: an expanded view can be read, not written."""
    if not torch.equal(tensor, before):
        tensor.detach().copy_(before)


_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # hooks, and the registries
_CONTAINERS = dict, list, tuple, set, collections.deque
_GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator
_OTHERS = Tensor, nn.Module, np.ndarray, torch.optim.Optimizer, *_GENERATORS, *_CONTAINERS
# Objects of these are not the model's own, or have their state in C.
_FOREIGN = frozenset(sys.stdlib_module_names - {"argparse", "types"}) | {"torch", "numpy", "lightning", "pytorch_lightning", "accelerate"}
_CODE = type, types.ModuleType, types.FunctionType, types.MethodType, torch.utils.data.Dataset


def _holds(value: Any) -> bool:
    """Whether there is anything in it to have back."""
    return isinstance(value, _OTHERS) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether it is an object of somebody's own class, whose attributes are its state."""
    if isinstance(value, (*_OTHERS, *_CODE)) or type(value).__module__.partition(".")[0] in _FOREIGN:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _generator(generator: Any) -> list[Restore]:
    if isinstance(generator, torch.Generator):
        return [functools.partial(generator.set_state, generator.get_state())]
    if isinstance(generator, random.SystemRandom):
        return []
    if isinstance(generator, random.Random):
        return [functools.partial(generator.setstate, generator.getstate())]
    if isinstance(generator, np.random.RandomState):
        return [functools.partial(generator.set_state, generator.get_state())]
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return [functools.partial(setattr, bits, "state", bits.state)]


def _refill(held: Any, before: Any) -> None:
    """The content of a container as it was."""
    if _same(held, before):
        return
    if isinstance(held, list):
        held[:] = before
        return
    held.clear()
    held.extend(before) if isinstance(held, collections.deque) else held.update(before)


def _same(held: Any, before: Any) -> bool:
    if isinstance(held, set):
        return bool(held == set(before))
    if isinstance(held, dict):
        return held.keys() == before.keys() and all(held[key] is value for key, value in before.items())
    return len(held) == len(before) and all(a is b for a, b in zip(held, before, strict=True))
