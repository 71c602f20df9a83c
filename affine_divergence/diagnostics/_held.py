# How to have back what a model or a loss holds, in the same objects: tensors, arrays, generators, containers, modules, plain objects.
#
# Everything that can be reached is looked at once and gives one restore of its own content alone.
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

from affine_divergence.diagnostics._storages import place_of, places

Restore = Callable[[], Any]
_LARGEST = 2**26  # bytes of tensors and arrays that plain objects hold; what is above is data, and is not copied


class Held:
    """What was looked at, as it was then; optimisers are met, not looked at, and no tensor is that shares memory with those apart."""

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self._apart = places(apart)
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
            below = not isinstance(value, nn.Module) and (plain or _is_plain(value))
            left += [(one, below) for one in self._at(value, plain) if type(one) not in _ATOMS]

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
        again = [restore for restore, _ in attempted(self._restores)]  # an expanded view is what it was once its base is
        return [error for _, error in attempted(again)]

    def _at(self, value: Any, plain: bool) -> Iterator[Any]:
        """Keeps what a value holds, and goes on to that."""
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, torch.jit.ScriptModule):  # whose attributes are C++'s
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, nn.parallel.DistributedDataParallel):  # its own attributes go with what is C++'s
            yield from value.children()
        elif isinstance(value, nn.Module):
            for registry in (value._parameters, value._buffers, value._modules):
                self._restores.append(functools.partial(_refill, registry, dict(registry)))
                yield from registry.values()
            self._restores.append(functools.partial(_refill, vars(value), dict(vars(value))))
            yield from (one for name, one in vars(value).items() if name not in _OF_ANY_MODULE)
        elif isinstance(value, (Tensor, np.ndarray)):
            self._keep(value, plain)
        elif isinstance(value, GENERATORS):
            self._restores += _generator(value)
        else:
            content = value if isinstance(value, _CONTAINERS) else vars(value)
            before: Any = dict(content) if isinstance(content, dict) else list(content)
            if not isinstance(content, tuple):
                self._restores.append(functools.partial(_refill, content, before))
            yield from before.values() if isinstance(before, dict) else before
            yield getattr(content, "__dict__", None)  # of a container of somebody's own class

    def _keep(self, value: Tensor | np.ndarray[Any, Any], plain: bool) -> None:
        if plain:
            self._copied += value.size * value.itemsize if isinstance(value, np.ndarray) else value.numel() * value.element_size()
            if self._copied > _LARGEST:
                return
        if isinstance(value, np.ndarray):
            if value.flags.writeable and not isinstance(value, np.memmap):  # which is a file
                self._restores.append(functools.partial(_rewrite_array, value, value.copy()))
        elif value.layout != torch.strided:  # which cannot be compared
            self._restores.append(functools.partial(value.copy_, value.detach().clone()))
        elif not value.is_meta and place_of(value) not in self._apart:
            self._restores.append(functools.partial(rewrite, value, value.detach().clone()))


def attempted(restores: Iterable[Restore]) -> list[tuple[Restore, Exception]]:
    """Each, whatever becomes of the others; those that went wrong."""
    failed = []
    for restore in restores:
        try:
            restore()
        except Exception as error:
            failed.append((restore, error))
    return failed


def rewrite(tensor: Tensor, before: Tensor) -> None:
    """Where it has changed: an expanded view can be read, not written."""
    try:
        same = torch.equal(tensor, before)
    except (RuntimeError, NotImplementedError):  # of a dtype that cannot be compared
        same = False
    if not same:
        tensor.detach().copy_(before)


def _rewrite_array(array: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    if not np.array_equal(array, before):
        np.copyto(array, before)


_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # hooks, and the registries
_CONTAINERS = dict, list, tuple, set, collections.deque
GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator
_ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None)))
_OTHERS = Tensor, nn.Module, np.ndarray, torch.optim.Optimizer, *GENERATORS, *_CONTAINERS
# Objects of these are not the model's own, or have their state in C.
_FOREIGN = frozenset(sys.stdlib_module_names - {"argparse", "types"}) | {"torch", "numpy", "lightning", "pytorch_lightning", "accelerate"}
_CODE = type, types.ModuleType, types.FunctionType, types.MethodType, torch.utils.data.Dataset


def _holds(value: Any) -> bool:
    """Whether there is anything in it to have back."""
    return isinstance(value, _OTHERS) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether it is an object of somebody's own class, whose attributes are its state."""
    if isinstance(value, (*_OTHERS, *_CODE)) or is_foreign(type(value)):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def is_foreign(code: Any) -> bool:
    """Whether a class or a function is of the standard library, of torch, or of what trains with it."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in _FOREIGN


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
    """The content of a container as it was, by the methods of its kind: a class of one's own may forbid what is done here."""
    if _same(held, before):
        return
    if isinstance(held, list):
        list.__setitem__(held, slice(None), before)
    elif isinstance(held, collections.deque):
        collections.deque.clear(held)
        collections.deque.extend(held, before)
    elif isinstance(held, set):
        set.clear(held)
        set.update(held, before)
    else:
        kind = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
        kind.clear(held)
        for key, value in before.items():
            kind.__setitem__(held, key, value)


def _same(held: Any, before: Any) -> bool:
    if isinstance(held, set):
        return bool(set(held) == set(before))
    if isinstance(held, dict):  # in the same order
        return len(held) == len(before) and all(a is b and held[a] is before[b] for a, b in zip(held, before, strict=True))
    return len(held) == len(before) and all(a is b for a, b in zip(held, before, strict=True))
