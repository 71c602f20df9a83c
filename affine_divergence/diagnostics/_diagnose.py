# diagnose: one step of an optimiser on one batch, taken, told and taken back.
from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._about import about
from affine_divergence.diagnostics._capture import Capture
from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._counterfactual import counterfactuals, inner, steps
from affine_divergence.diagnostics._inputs import called_with, copied
from affine_divergence.diagnostics._layers import find_layers
from affine_divergence.diagnostics._records import Counterfactual, Diagnosis, LossChange, Step
from affine_divergence.diagnostics._restoring import Beginning, untouched
from affine_divergence.diagnostics._samples import KEPT
from affine_divergence.diagnostics._stepped import stepped, without_autocast
from affine_divergence.diagnostics._suspended import suspended
from affine_divergence.diagnostics._wrappers import unwrapped

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[..., "Tensor"]
_ONE_AT_A_TIME = threading.RLock()  # what torch.compile is told to do is told to the whole process
_SAMPLED = 3  # calls whose rows are kept for a scatter, the worst


def diagnose(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    targets: Any = None,
    loss_fn: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    include: str | Sequence[str] | None = None,
    plain: bool = True,
    rank: bool = True,
    counterfactual: bool = True,
) -> Diagnosis:
    r"""What one training step on this batch does to the activations of every layer, against what it should do.

    The step is taken: forward, backward, `optimizer.step()`. The change δz_i of each row of a layer's output by the layer's own
    parameters is then the layer applied to their actual change, whatever the optimiser made of the gradient, and is held
    against −g_i, the row's own steepest descent. For that no Gram matrix is formed and no gradient of a single sample. In the
    end the model, the optimiser, gradients and random numbers are as they were; what hooks of yours do elsewhere is done. A compiled
    model is run without compilation.

    Numbers are of a layer's own parameters, first order: layers before it move too, and that is not in them. Under plain gradient
    descent multipliers, alignment and interference do not depend on whether the loss is a mean or a sum; the update ratio does,
    and so does what other optimisers, or weight decay, do. The model is run in the mode that it is in: call `model.train()`
    first to see a training step.

    Args:
        model: any model. Measured are nn.Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, Embedding, the projections of
            MultiheadAttention, the Conv1D of transformers, and the layers of `affine_divergence.nn`; everything else that has
            parameters is listed in `.coverage` with the reason.
        inputs: a batch as the model takes it: one tensor, a tuple or list of positional arguments, or a dict of keyword ones.
        targets: second argument of loss_fn; without targets it gets the output alone.
        loss_fn: (output, targets) → a scalar. None: the output's own `loss`.
        optimizer: over the model's parameters, in the state in which its next step is of interest. None: plain gradient
            descent, torch.optim.SGD.
        lr: the learning rate of that, 1.0 where not given.
        include: pattern of module names, or several, as "encoder.*"; None is all.
        plain: also what the plain gradient implies (fields that end with _plain), the interference and the self-check.
        rank: also the numerical rank of the rows, a matrix of d + 1 or N columns for each layer.
        counterfactual: also what each correction would do on this batch, and the loss after equally long steps. The batch
            correction solves a system of that size for each layer.

    Returns:
        A Diagnosis: `.rows`, `.coverage`, `.loss`, `.checks`, `.counterfactual`, `.steps`; prints as a table with verdicts.

    Raises:
        TypeError: model is not an nn.Module, optimizer not an optimiser, or the loss not a tensor.
        RuntimeError: in torch.inference_mode().
        ValueError: the loss is not a scalar, optimizer has none of the model's parameters, lr is given with an optimizer or is not
            positive, targets without a loss_fn, or include fits nothing.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> torch.nn.init.zeros_(layer.weight) is layer.weight
    True
    >>> x, target = torch.tensor([[3.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [-1.0]])
    >>> row = diagnose(layer, x, target, lambda z, t: 0.5 * (z - t).square().sum()).rows[0]
    >>> row.multiplier_median, row.below_zero  # of z the step changes (+7, +2), (+1, −1) is ideal: multipliers 7 and −2
    (2.5, 0.5)
    """
    _check(model, targets, loss_fn, optimizer, lr)
    model = getattr(model, "_orig_mod", model)
    found, training, assumed = find_layers(model, include), model.training, optimizer is None and lr is None
    if optimizer is None:
        optimizer = torch.optim.SGD(_learning(model), lr=1.0 if lr is None else lr)
    optimizer, _ = unwrapped(optimizer)
    if not {p for group in optimizer.param_groups for p in group["params"]} & set(model.parameters()):
        raise ValueError("optimizer has none of the model's parameters; build it from model.parameters()")
    with _ONE_AT_A_TIME, suspended(), _eager(), untouched(model, optimizer, loss_fn) as beginning, torch.enable_grad():
        batch = _Batch(model, inputs, targets, loss_fn, beginning)
        with Capture(found) as capture:
            capture.listening = True
            loss = batch.loss()
            _check_loss(loss)
            start = loss.item()
            with _gradients_of_others(loss, set(beginning.parameters)):
                loss.backward()
                capture.listening = False
                had = {p: p.grad.detach().clone() for p in beginning.parameters if p.grad is not None}
                before = Before.of(optimizer, beginning.values, beginning.values, assumed=assumed)
                capture.settle(before.values)
                _step(optimizer, batch)
                _drop_gradients(had)
            del loss  # with the hooks in its graph, that hold what was captured
            with torch.no_grad(), without_autocast():
                told = stepped(model, capture, before, plain=plain, ranks=rank, had=had, scaled=False, sampled=_SAMPLED, kept=KEPT)
        repeated = math.nan
        of_corrections: Sequence[Counterfactual] = ()
        taken: Sequence[Step] = ()
        with torch.no_grad():
            widths = told.inputs()
            expected = inner(had, before.change, before.values)
            if counterfactual:
                with without_autocast():
                    of_corrections, directions = counterfactuals(told.calls)
            told.calls.clear()  # forwards need the memory
            realised = batch.loss_again() - start
            if counterfactual:
                repeated = batch.loss_at(before, {})
                taken = steps(directions, before, had, lambda δ: batch.loss_at(before, δ) - start)
    return Diagnosis(
        step=0,
        about=about(model, optimizer, plain=plain, training=training, inputs=widths, assumed=assumed),
        coverage=told.coverage,
        rows=told.rows,
        checks=told.checks,
        loss=LossChange(before=start, after=start + realised, predicted=expected, realised=realised, repeated=repeated),
        counterfactual=tuple(of_corrections),
        steps=tuple(taken),
        samples=told.samples,
    )


@dataclass(frozen=True)
class _Batch:
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


def _drop_gradients(parameters: Iterable[Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _gradients_of_others(loss: Tensor, own: Set[Parameter]) -> Iterator[None]:
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


def _step(optimizer: torch.optim.Optimizer, batch: _Batch) -> None:
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


@contextmanager
def _eager() -> Iterator[None]:
    # Nothing can be compiled before dynamo is imported, which takes a second.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _learning(model: torch.nn.Module) -> list[Parameter]:
    found = [p for p in model.parameters() if p.requires_grad]
    if not found:
        raise ValueError("no parameter of the model learns: requires_grad is False for all")
    return found


def _check(model: Any, targets: Any, loss_fn: Any, optimizer: Any, lr: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ValueError("the model has lazy parameters without a shape yet; run a forward first")
    if torch.is_inference_mode_enabled() or any(p.is_inference() for p in model.parameters()):
        raise RuntimeError("a step needs gradients: leave torch.inference_mode(), and make the model outside it")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has parameters without values, on the device meta; load or initialise them first")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (output, targets), got {type(loss_fn).__name__}")
    if targets is not None and loss_fn is None:
        raise ValueError("targets are of use with a loss_fn only; give one, or put them into inputs where the model makes its own loss")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if lr is None:
        return
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr must be a number, got {type(lr).__name__}")
    if optimizer is not None:
        raise ValueError("lr is for the plain gradient descent that is assumed without an optimizer; leave it out: the optimizer has one")
    if not 0.0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {lr!r}")


def _check_loss(loss: Any) -> None:
    if not torch.is_tensor(loss):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise ValueError(f"the loss must be a scalar, got shape {tuple(loss.shape)}; reduce it by .mean() or .sum()")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no parameter that learns: nothing would move")
