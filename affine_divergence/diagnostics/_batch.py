# The batch that is diagnosed: its loss, as often as it is asked for, and one step of an optimiser on it.
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._inputs import called_with, copied
from affine_divergence.diagnostics._restoring import Beginning

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[..., "Tensor"]


@dataclass(frozen=True)
class Batch:
    """What a loss is made of, again and again from the same beginning."""

    model: torch.nn.Module
    inputs: Any
    targets: Any
    loss_fn: Loss | None
    beginning: Beginning

    def loss(self) -> Tensor:
        """Of a forward, as the model and the random numbers now are."""
        inputs, targets = copied((self.inputs, self.targets))  # a forward may write to its inputs
        output = called_with(self.model, inputs)
        if self.loss_fn is not None:
            return self.loss_fn(output) if targets is None else self.loss_fn(output, targets)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                f"the model's output, a {type(output).__name__}, has no loss; give loss_fn (and targets), or the inputs that make one"
            )
        found: Tensor = loss
        return found

    def loss_again(self) -> float:
        """With the parameters of now and everything else as at first, the same dropout included."""
        self.beginning.again()
        with torch.enable_grad():  # a forward may itself differentiate; one with reentrant checkpoints warns of inputs without gradients
            return self.loss().item()

    def loss_at(self, before: Before, change: Mapping[Parameter, Tensor]) -> float:
        """With the parameters as they were, plus a change."""
        for parameter, old in before.values.items():
            parameter.copy_(old + change[parameter] if parameter in change else old)
        return self.loss_again()


def drop_gradients(parameters: Iterable[Parameter]) -> None:
    """Of parameters, which have None then."""
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def gradients_of_others(loss: Tensor, own: Set[Parameter]) -> Iterator[None]:
    """What else the loss depends on, as a loss with parameters of its own does, keeps the gradients that it has."""
    others = [(leaf, leaf.grad) for leaf in _leaves(loss) if leaf not in own]
    for leaf, _ in others:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in others:
            leaf.grad = gradient


def _leaves(loss: Tensor) -> Iterator[Any]:
    """The leaves of the loss's graph."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        left += [before for before, _ in node.next_functions]


def take_step(optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One step; an optimiser that asks for the loss again, as LBFGS does, gets it on the same batch with the same random numbers."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        optimizer.step()
        return

    def again() -> Tensor:
        batch.beginning.again()
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = batch.loss()
            loss.backward()
        return loss

    optimizer.step(again)  # type: ignore[arg-type]  # LBFGS takes a tensor, and makes a float of it
