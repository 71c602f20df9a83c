# Capturing what each layer was given and the gradient at its output: a forward hook on the module, a tensor hook on what it returned.
#
# Only a call whose gradient arrives is kept; until then the graph alone holds what was seen of it, and drops it with itself.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from affine_divergence.diagnostics._hooks import AfterHook, BeforeHook, LayerHook, Watch
from affine_divergence.diagnostics._layers import Found, Layer
from affine_divergence.diagnostics._suspended import depth

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle


WITHOUT_GRADIENTS = "called without gradients only, as in torch.no_grad() or torch.inference_mode()"
IN_A_TRANSFORM = "called inside a transform of torch.func (grad, vmap, …), in which no gradient is captured"
ADDS_NOTHING = (
    "called, and a gradient arrived by a pass that does not add to .grad, as torch.autograd.grad, which is not captured: "
    "use loss.backward()"
)
DIFFERENTIABLE = "called, and a gradient arrived by a pass with create_graph=True, which is not captured: use a loss.backward() without it"


class Call:
    """One call of a layer: its input, ∂L/∂z, and what tells whether they still are what they were."""

    __slots__ = ("_versions", "g", "layer", "options", "round", "sequence", "task", "x")

    def __init__(self, layer: Layer, x: Tensor, options: Sequence[Any], round_: int, sequence: int) -> None:
        self.layer, self.x, self.options, self.round, self.sequence = layer, x.detach(), options, round_, sequence
        self.g: Tensor | None = None
        self.task = -1
        self._versions: tuple[int | None, int | None] = (_version(x), None)

    def arrive(self, g: Tensor, task: int) -> None:
        """A gradient at the output; several of one call, as of two losses, are one sum."""
        self.g = g if self.g is None else self.g + g
        self.task = task
        self._versions = (self._versions[0], _version(self.g))

    def changed(self) -> str | None:
        """Which of both was changed in place since it was seen."""
        assert self.g is not None
        if _version(self.x) != self._versions[0]:
            return "its input"
        return "the gradient at its output" if _version(self.g) != self._versions[1] else None


class Capture:
    """Watches the layers of a model while it is attached, and keeps calls while it listens."""

    def __init__(
        self,
        found: Found,
        failed: Callable[[Exception], None] | None = None,
        dropped: Callable[[Layer], None] | None = None,
    ) -> None:
        self.found = found
        self.listening = False
        self.calls: list[Call] = []
        self.forwards: Counter[Layer] = Counter()
        self.unheard: dict[nn.Module, str] = {}  # how a module was called where nothing is learned
        self.aside: dict[Layer, str] = {}  # by what a gradient arrived that is not kept
        self._failed = failed
        self._dropped = dropped  # told of a layer whose gradient was dropped before a step
        self._depth = depth()
        self._round = 0
        self._sequence = 0
        self._handles: list[RemovableHandle] = []
        self._watches: list[Watch] = []

    def attach(self) -> None:
        """Register the hooks, once."""
        if self._handles:
            return
        for site in self.found.sites:
            if isinstance(site.module, nn.MultiheadAttention):
                watch = Watch(self, site)
                self._watches.append(watch)
                self._handles.append(site.module.register_forward_pre_hook(BeforeHook(self, watch), prepend=True))
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
        self.listening = False
        self.drop()

    def __enter__(self) -> Capture:
        self.attach()
        return self

    def __exit__(self, *raised: object) -> None:
        self.detach()

    def drop(self) -> None:
        """Forget all calls, also those whose gradient is still to come."""
        self.calls.clear()
        self.forwards.clear()
        self.unheard.clear()
        self.aside.clear()
        self._round += 1
        self._sequence = 0

    def in_order(self) -> list[Call]:
        """The calls as they were made."""
        return sorted(self.calls, key=lambda call: call.sequence)

    def hears(self, module: nn.Module) -> bool:
        """Whether a call of the module is to be looked at now."""
        if torch.compiler.is_compiling() or not self.listening or depth() != self._depth:
            return False
        if not torch.is_grad_enabled():
            self.unheard[module] = WITHOUT_GRADIENTS
            return False
        if torch._C._are_functorch_transforms_active():
            self.unheard[module] = IN_A_TRANSFORM
            return False
        return True

    def called(self, parts: Sequence[tuple[Layer, slice | None]], x: Tensor, options: Sequence[Any], z: Any) -> None:
        """A layer, or several whose outputs lie side by side in z, was called."""
        if not isinstance(z, torch.Tensor) or not z.requires_grad:
            return
        in_backward = torch._C._current_graph_task_id() != -1  # recomputed for a checkpoint: counted if its gradient comes
        calls = []
        for layer, columns in parts:
            if not learns(layer):
                continue
            calls.append((Call(layer, x, options, self._round, self._sequence), columns))
            self._sequence += 1
            if not in_backward:
                self.forwards[layer] += 1

        def arrived(g: Tensor) -> None:
            try:
                for call, columns in calls:
                    self._arrived(call, g.detach() if columns is None else g.detach()[..., columns], g.requires_grad, in_backward)
            except Exception as error:
                self.fail(error)

        if calls:
            z.register_hook(arrived)

    def fail(self, error: Exception) -> None:
        """Hand on what went wrong, or raise it."""
        if self._failed is None:
            raise error
        self._failed(error)

    def _arrived(self, call: Call, g: Tensor, differentiable: bool, recomputed: bool) -> None:
        if call.round != self._round or not self.listening:
            return
        # A pass with create_graph is differentiated again; what it adds to the parameters comes with the second pass.
        if differentiable or not _adds_up(call.layer):
            self.aside[call.layer] = DIFFERENTIABLE if differentiable else ADDS_NOTHING
            return
        task = torch._C._current_graph_task_id()
        if call.g is None:
            self._drop_zeroed(call.layer, task)
            self.calls.append(call)
            if recomputed:
                self.forwards[call.layer] += 1
        call.arrive(g, task)

    def _drop_zeroed(self, layer: Layer, task: int) -> None:
        # What earlier passes left in .grad was dropped before this one: they have no part in the step that follows.
        stale = [call for call in self.calls if call.layer is layer and call.task != task]
        if stale and not any(part is not None and is_there(part.parameter.grad) for part in layer.parts):
            self.calls = [call for call in self.calls if call not in stale]
            self.forwards[layer] -= len(stale)
            if self._dropped is not None:
                self._dropped(layer)


def learns(layer: Layer) -> bool:
    """Whether anything of it is to be learned."""
    return any(part is not None and part.parameter.requires_grad for part in layer.parts)


def is_there(gradient: Tensor | None) -> bool:
    """Whether it is one that is not zeros, as zero_grad(set_to_none=False) leaves."""
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _adds_up(layer: Layer) -> bool:
    """Whether the present pass adds to the gradient of the layer's parameters; one for the gradient of something else does not."""
    learning = [part.parameter for part in layer.parts if part is not None and part.parameter.requires_grad]
    with torch.enable_grad():
        nodes: list[Any] = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in learning]  # type: ignore[union-attr]
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # of autograd.grad for this very parameter, which is returned, not added
        return False


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
