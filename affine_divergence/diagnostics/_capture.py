# Capturing what each layer was given and the gradient at its output: a forward hook on the module, a tensor hook on what it returned.
#
# Only a call whose gradient arrives is kept; until then the graph alone holds what was seen of it, and drops it with itself.
from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from affine_divergence.diagnostics._attention import Layout
from affine_divergence.diagnostics._call import Call
from affine_divergence.diagnostics._cleared import Gone, asked, gone, stepped_by
from affine_divergence.diagnostics._faults import reason_of
from affine_divergence.diagnostics._hooks import AfterHook, BeforeHook, LayerHook, Watch
from affine_divergence.diagnostics._layers import Found, Layer
from affine_divergence.diagnostics._passes import Passes, adds_up
from affine_divergence.diagnostics._storages import places
from affine_divergence.diagnostics._suspended import depth
from affine_divergence.diagnostics._unexplained import (
    ADDS_NOTHING,
    CLEARED,
    DIFFERENTIABLE,
    IN_A_TRANSFORM,
    PARTLY,
    PENALISED,
    WITHOUT_GRADIENTS,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle


_INNERMOST: dict[nn.Module, int] = {}  # of modules that are being diagnosed, the depth of the innermost diagnosis


class Capture:
    """Watches the layers of a model while it is attached, and keeps calls while it listens."""

    def __init__(
        self,
        found: Found,
        optimizer: torch.optim.Optimizer,
        failed: Callable[[Exception], None] | None = None,
        dropped: Callable[[Layer], None] | None = None,
    ) -> None:
        self.found, self.optimizer = found, optimizer
        self.listening = False
        self.forwards: Counter[Layer] = Counter()
        self.unheard: dict[nn.Module, str] = {}  # how a module was called where nothing is learned
        self.aside: dict[Layer, str] = {}  # by what a gradient arrived that is not kept
        self.faults: dict[Layer, str] = {}  # what went wrong with one
        self.differentiated: set[Layer] = set()  # that a pass with create_graph=True reached
        self.partly: set[Layer] = set()  # of whose parameters' gradients one has its calls, and another has not
        self._failed = failed
        self._dropped = dropped  # told of a layer whose gradient was dropped before a step
        self._depth = depth()
        self._lock = threading.Lock()  # branches of a model may run in threads
        self._round = 0
        self._sequence = 0
        self._kept: dict[Layer, list[Call]] = defaultdict(list)
        self._sharing: dict[Layer, list[Layer]] = {}  # of each layer those that have a parameter of its, itself too
        self._passed: dict[Layer, int] = {}  # the last backward that reached a layer
        self._own: set[int] = set()  # in a step, where the parameters lie that it changes
        self._settled: dict[int, int] = {}  # of calls before a step, by which backward they had their gradient
        self._stepped: tuple[int, Container[nn.Parameter]] = (-1, ())  # in the last backward, the parameters that the optimiser has
        self._gone: tuple[int, Gone] = (-1, Gone({}, set()))  # what .grad lacked when the last one that counts began
        self._passes = Passes()
        self._handles: list[RemovableHandle] = []
        self._watches: list[Watch] = []
        self._taken: dict[nn.Module, int] = {}  # with the depth of what had it before

    def attach(self) -> None:
        """Register the hooks, once; an error leaves none."""
        if self._handles or self._taken:
            return
        try:
            self._register()
        except BaseException:
            self.detach()
            raise

    def _register(self) -> None:
        self._take()
        self._sharing = _sharing([layer for site in self.found.sites for layer in site.layers])
        for site in self.found.sites:
            if isinstance(site.module, nn.MultiheadAttention):
                watch = Watch(self, site)
                self._watches.append(watch)
                self._handles.append(site.module.register_forward_pre_hook(BeforeHook(self, watch), with_kwargs=True, prepend=True))
                self._handles.append(site.module.register_forward_hook(AfterHook(self, watch), always_call=True))
            else:  # before the model's own hooks, which may return something else
                self._handles.append(site.module.register_forward_hook(LayerHook(self, site), with_kwargs=True, prepend=True))

    def detach(self) -> None:
        """Remove the hooks and drop what was kept."""
        for handle in self._handles:
            handle.remove()
        for watch in self._watches:
            watch.end()
        self._handles.clear()
        self._watches.clear()
        for module, outer in self._taken.items():
            _INNERMOST[module] = outer
            if not outer:
                del _INNERMOST[module]
        self._taken.clear()
        self.listening = False
        self.drop()

    def __enter__(self) -> Capture:
        self.attach()
        return self

    def __exit__(self, *raised: object) -> None:
        self.detach()

    def _take(self) -> None:
        """In a diagnosis, have the model's modules for it alone."""
        if self._depth:
            modules = [site.module for site in self.found.sites] + [module for module, _ in self.found.skipped.values()]
            self._taken = {module: _INNERMOST.get(module, 0) for module in modules}
            _INNERMOST.update(dict.fromkeys(modules, self._depth))

    def drop(self) -> None:
        """Forget all calls, also those whose gradient is still to come."""
        self._kept.clear()
        self.forwards.clear()
        self.unheard.clear()
        self.aside.clear()
        self.faults.clear()
        self.differentiated.clear()
        self.partly.clear()
        self._round += 1
        self._sequence = 0
        self._passed.clear()
        self._passes.forget()
        self._own.clear()
        self._settled.clear()
        self._stepped, self._gone = (-1, ()), (-1, Gone({}, set()))

    def settle(self) -> None:
        """Before a step: what was cleared since it arrived has no part in it."""
        self._settle(self.calls)
        self._own = places(stepped_by(self.optimizer))
        for call in self.calls:
            call.keep_input(self._own)
        self._settled = {id(call): call.passed for call in self.calls}

    def settle_again(self) -> None:
        """After a step with a closure, which may have cleared what was there before it."""
        self._settle([call for call in self.calls if self._settled.get(id(call)) == call.passed])

    def _settle(self, calls: Sequence[Call]) -> None:
        stepped = stepped_by(self.optimizer)
        lacking = gone([call for call in calls if any(part.parameter in stepped for part in asked(call.layer, stepped))], stepped)
        self._forget([call for calls in lacking.calls.values() for call in calls])
        self.partly |= lacking.partly

    @property
    def calls(self) -> list[Call]:
        """Those that a gradient arrived for."""
        return [call for of_layer in self._kept.values() for call in of_layer]

    def doubt(self, layer: Layer) -> str:
        """Why its calls may not be all that its parameters' gradients are made of, where no check tells."""
        return PARTLY if layer in self.partly else PENALISED if layer in self.differentiated else ""

    def in_order(self) -> list[Call]:
        """The calls as they were made."""
        return sorted(self.calls, key=lambda call: call.sequence)

    def hears(self, module: nn.Module) -> bool:
        """Whether a call of the module is to be looked at now."""
        if torch.compiler.is_compiling() or not self.listening or not self._is_here(module):
            return False
        if not torch.is_grad_enabled():
            self.unheard[module] = WITHOUT_GRADIENTS
            return False
        if torch._C._are_functorch_transforms_active():
            self.unheard[module] = IN_A_TRANSFORM
            return False
        return True

    def _is_here(self, module: nn.Module) -> bool:
        # A model may run parts of itself in threads that know of no diagnosis, as does what is recomputed on a GPU: what they call is of
        # the innermost diagnosis that has the module, and where none has of those that listen to a training.
        return depth() in (0, self._depth) and _INNERMOST.get(module, 0) <= self._depth

    def called(
        self, parts: Sequence[tuple[Layer, slice | None]], x: Tensor, options: Sequence[Any], z: Any, layout: Layout | None = None
    ) -> None:
        """A layer, or several whose outputs lie side by side in z, was called."""
        if not isinstance(z, torch.Tensor) or not z.requires_grad:
            return
        calls = []
        with self._lock:
            for layer, columns in parts:
                if not learns(layer):
                    continue
                call = Call(layer, x, options, layout, self._round, self._sequence)
                calls.append((call, columns))
                self._sequence += 1
                if call.inside == -1:  # a recomputed one counts when its gradient comes
                    self._count(call)

        def arrived(g: Tensor) -> None:
            try:
                with self._lock:
                    for call, columns in calls:
                        self._arrived(call, g.detach() if columns is None else g.detach()[..., columns], g.requires_grad)
            except Exception as error:
                self.fail(error, [call.layer for call, _ in calls])

        if calls:
            z.register_hook(arrived)

    def fail(self, error: Exception, layers: Sequence[Layer]) -> None:
        """Hand on what went wrong; of these layers nothing is told in this step but that."""
        if self._failed is not None:
            self._failed(error)
        for layer in layers:
            self.faults[layer] = reason_of(error)
            self._kept.pop(layer, None)

    def _arrived(self, call: Call, g: Tensor, differentiable: bool) -> None:
        if call.round != self._round or not self.listening or call.layer in self.faults:
            return
        # A pass with create_graph is differentiated again; what it adds to the parameters comes with the second pass.
        present = self._passes.of(call)
        if self._stepped[0] != present:
            self._stepped = present, stepped_by(self.optimizer)
        if differentiable or not adds_up(asked(call.layer, self._stepped[1])):
            self.aside[call.layer] = DIFFERENTIABLE if differentiable else ADDS_NOTHING
            if differentiable:
                self.differentiated.add(call.layer)
            return
        if self._passed.get(call.layer) != present:  # .grad has nothing of it yet: what it lacks of earlier ones was cleared
            self._passed[call.layer] = present
            self._drop_gone(call.layer, present)
        if call.g is None:
            self._kept[call.layer].append(call)
            self._count(call)
        call.arrive(g, present)
        if self._own:  # in the closure of a step
            call.keep_input(self._own)

    def _count(self, call: Call) -> None:
        if not call.counted:
            call.counted = True
            self.forwards[call.layer] += 1

    def _drop_gone(self, layer: Layer, present: int) -> None:
        """Forget calls of a layer, and of those that share its parameters, whose gradient was dropped before the present backward."""
        if self._gone[0] != present:  # asked at its beginning and for all layers: each answer would hold up a GPU
            kept = [call for call in self.calls if call.passed != present]
            self._gone = present, gone(kept, self._stepped[1])
        sharing, lacking = self._sharing[layer], self._gone[1]
        calls = [call for one in sharing for call in lacking.calls.pop(one, ()) if call.passed != present]
        self.partly |= lacking.partly.intersection(sharing)
        self._forget(calls)
        if self._dropped is not None:
            for one in {call.layer: None for call in calls}:
                self._dropped(one)

    def _forget(self, calls: Sequence[Call]) -> None:
        """As if no gradient had arrived; one that arrives later, by the same graph, is the first."""
        for call in calls:
            call.g = None
            call.counted = False
            self.forwards[call.layer] -= 1
            self._kept[call.layer].remove(call)
            self.aside[call.layer] = CLEARED
            if not self._kept[call.layer]:
                self.partly.discard(call.layer)


def _sharing(layers: Sequence[Layer]) -> dict[Layer, list[Layer]]:
    by_parameter: dict[nn.Parameter, list[Layer]] = defaultdict(list)
    for layer in layers:
        for part in layer.parts:
            if part is not None:
                by_parameter[part.parameter].append(layer)
    parameters = {layer: [part.parameter for part in layer.parts if part is not None] for layer in layers}
    return {layer: list({layer: None} | {other: None for p in parameters[layer] for other in by_parameter[p]}) for layer in layers}


def learns(layer: Layer) -> bool:
    """Whether anything of it is to be learned."""
    return any(part is not None and part.parameter.requires_grad for part in layer.parts)
