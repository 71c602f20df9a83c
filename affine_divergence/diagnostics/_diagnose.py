# diagnose: one step of an optimiser on one batch, taken, told and taken back.
from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._about import about
from affine_divergence.diagnostics._arguments import check_loss, check_step, check_trains
from affine_divergence.diagnostics._batch import Batch, Loss, drop_gradients, gradients_of_others, take_step
from affine_divergence.diagnostics._capture import Capture
from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._counterfactual import counterfactuals, inner, steps
from affine_divergence.diagnostics._layers import find_layers
from affine_divergence.diagnostics._records import Counterfactual, Diagnosis, LossChange, Step
from affine_divergence.diagnostics._restoring import untouched
from affine_divergence.diagnostics._samples import KEPT
from affine_divergence.diagnostics._stepped import stepped, without_autocast
from affine_divergence.diagnostics._suspended import suspended
from affine_divergence.diagnostics._wrappers import unwrapped

if TYPE_CHECKING:
    from torch import Tensor

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
    check_step(model, targets, loss_fn, optimizer, lr)
    model = getattr(model, "_orig_mod", model)
    found, training, assumed = find_layers(model, include), model.training, optimizer is None and lr is None
    if optimizer is None:
        optimizer = torch.optim.SGD(_learning(model), lr=1.0 if lr is None else lr)
    optimizer, _ = unwrapped(optimizer)
    check_trains(optimizer, model)
    with _ONE_AT_A_TIME, suspended(), _eager(), untouched(model, optimizer, loss_fn) as beginning, torch.enable_grad():
        batch = Batch(model, inputs, targets, loss_fn, beginning)
        with Capture(found, optimizer) as capture:
            capture.listening = True
            loss = batch.loss()
            check_loss(loss)
            start = loss.item()
            with gradients_of_others(loss, set(beginning.parameters)):
                loss.backward()
                capture.listening = False
                had = {p: p.grad.detach().clone() for p in beginning.parameters if p.grad is not None}
                before = Before.of(optimizer, beginning.values, beginning.values, assumed=assumed)
                capture.settle()
                take_step(optimizer, batch)
                drop_gradients(had)
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
