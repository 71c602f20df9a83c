# How to have back what a model or an optimiser holds, in the same objects: tensors, arrays, generators, containers, modules, plain objects.
from __future__ import annotations

import collections
import functools
import random
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

Restore = Callable[[], Any]


def saved(value: Any, known: dict[int, Restore]) -> Restore:
    """How to have a value back with all that it holds; what is known already, by id, is not looked at again."""
    if id(value) not in known:
        known[id(value)] = lambda: value  # one that holds itself; and it must live as long as its number stands for it
        known[id(value)] = _restore(value, known)
    return known[id(value)]


def saved_modules(model: nn.Module, known: dict[int, Restore]) -> Restore:
    """Of every module its attributes with what they hold, and its buffers; not its parameters' values."""
    modules = list(model.modules())
    for module in modules:
        known.setdefault(id(module), lambda: None)  # where one holds another, as a parent in a list
    restores = [restore for module in modules for restore in _of_module(module, known)]
    return functools.partial(_all, restores)


_OF_ANY_MODULE = frozenset(vars(nn.Module()))  # hooks, and the registries


def _of_module(module: nn.Module, known: dict[int, Restore]) -> list[Restore]:
    if isinstance(module, torch.jit.ScriptModule):  # whose attributes are C++'s
        return [saved(list(module.buffers(recurse=False)), known)]
    own = dict(vars(module))
    registries = module._parameters, module._buffers, module._modules
    held = [value for name, value in own.items() if name not in _OF_ANY_MODULE and _holds(value)]
    return [
        functools.partial(_refill, vars(module), own),
        *(functools.partial(_refill, registry, dict(registry)) for registry in registries),
        *(saved(value, known) for value in (*held, *module._buffers.values()) if value is not None),
    ]


def _restore(value: Any, known: dict[int, Restore]) -> Restore:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, nn.Module):  # one that is not the model's: its parameters too
        return functools.partial(_all, [saved_modules(value, known), *(saved(p, known) for p in value.parameters())])
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, _GENERATORS):
        return _generator(value)
    if isinstance(value, _CONTAINERS):
        content: Any = dict(value) if isinstance(value, dict) else list(value)
        inner = content.values() if isinstance(value, dict) else content
        return functools.partial(_all, [functools.partial(_refill, value, content), *(saved(one, known) for one in inner if _holds(one))])
    return saved(vars(value), known)


_CONTAINERS = dict, list, tuple, set, collections.deque
_GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator
# Objects of these are not the model's own, or have their state in C.
_FOREIGN = frozenset(sys.stdlib_module_names - {"argparse", "types"}) | {"torch", "numpy", "lightning", "pytorch_lightning", "accelerate"}
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)


def _holds(value: Any) -> bool:
    """Whether there is anything in it to have back."""
    if isinstance(value, (torch.Tensor, nn.Module, np.ndarray, torch.optim.Optimizer, *_GENERATORS, *_CONTAINERS)):
        return True
    if isinstance(value, (*_CODE, torch.utils.data.Dataset)) or type(value).__module__.partition(".")[0] in _FOREIGN:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _tensor(tensor: Tensor) -> Restore:
    if tensor.layout != torch.strided:  # which cannot be compared
        return functools.partial(tensor.copy_, tensor.detach().clone())
    before = tensor.detach().clone()

    def restore() -> None:
        if not torch.equal(tensor, before):  # a buffer that is an expanded view can be read, not written
            tensor.detach().copy_(before)

    return restore


def _array(array: np.ndarray[Any, Any]) -> Restore:
    return functools.partial(np.copyto, array, array.copy()) if array.flags.writeable else lambda: None


def _generator(generator: Any) -> Restore:
    if isinstance(generator, torch.Generator):
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return lambda: None
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return functools.partial(setattr, bits, "state", bits.state)


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
        return bool(held == set(before))
    return held.keys() == before.keys() and all(held[key] is value for key, value in before.items())


def _all(restores: list[Restore]) -> None:
    for restore in restores:
        restore()
