# The backward passes: which one runs, and whether it adds to the gradients of a layer.
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from affine_divergence.diagnostics._call import Call
    from affine_divergence.diagnostics._layers import Part


class Passes:
    """Tells a backward from others, and not from those inside it."""

    def __init__(self) -> None:
        self._outer: dict[int, int] = {}  # the one that a backward inside another belongs to

    def of(self, call: Call) -> int:
        """The backward that runs, or where that is one of a recomputed part inside another, the outermost."""
        task = torch._C._current_graph_task_id()
        if call.inside not in (-1, task):
            self._outer[task] = self._outer.get(call.inside, call.inside)
        return self._outer.get(task, task)

    def forget(self) -> None:
        """Those that were."""
        self._outer.clear()


def adds_up(parts: Iterable[Part]) -> bool:
    """Whether the present pass adds to the gradient of one of these; one for the gradient of something else does not."""
    learning = [part.parameter for part in parts if part.parameter.requires_grad]
    with torch.enable_grad():
        nodes: list[Any] = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in learning]  # type: ignore[union-attr]
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # of autograd.grad for this very parameter, which is returned, not added
        return False
