# Monitor: the diagnosis while a model trains, by the optimiser's step hooks, without a change to the training.
from __future__ import annotations

import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from affine_divergence.diagnostics._about import about
from affine_divergence.diagnostics._arguments import check_monitored, check_path, check_runs_hooks
from affine_divergence.diagnostics._capture import Capture
from affine_divergence.diagnostics._change import Before
from affine_divergence.diagnostics._file import append
from affine_divergence.diagnostics._layers import Layer, find_layers
from affine_divergence.diagnostics._records import Diagnosis, Row
from affine_divergence.diagnostics._stepped import stepped, without_autocast
from affine_divergence.diagnostics._suspended import is_suspended
from affine_divergence.diagnostics._unstepped import ENOUGH, Unstepped
from affine_divergence.diagnostics._wrappers import held_by, unwrapped

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Tracker = Callable[[Mapping[str, float], int], object]
_KEPT = 500  # rows of the worst call in each line of a file


class Scaler(Protocol):
    """What is needed of torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


class Monitor:
    r"""The diagnosis of every so many steps of a training, which stays bit for bit what it is.

    It listens by a forward hook on each layer, a tensor hook on what the layer returns, and the optimiser's step hooks; the change
    of the parameters is the one that the optimiser makes, clipping, momentum, weight decay and accumulated micro-batches included.
    Between the steps that are logged a hook costs a function call. On those that are, inputs and output gradients of all layers are
    held until the step, beside a copy of the measured parameters; a layer under activation checkpointing holds its input too.

    The first step is logged, then every `every`-th after it. What goes wrong inside is shown once, as a warning,
    or in the measures of one layer is a line of the coverage, and never stops the training. Under DistributedDataParallel each
    process sees its own samples: the measures of the actual change are right for them, those of the plain gradient are of this
    process alone. Layers in code that torch.compile compiled are not seen, and the coverage says so; of an optimiser's step that is
    compiled nothing is seen at all.

    Args:
        model: the model that trains.
        optimizer: its optimiser, or one of several; a monitor each. Of a wrapper that holds it as `.optimizer` and runs no hooks, as
            accelerate's, the one inside is taken.
        every: how many steps from one that is logged to the next.
        path: JSON lines are appended to this file, which `affine_divergence.diagnostics.load` reads.
        tracker: called as tracker(values, step) with a handful of aggregates, as those of
            `affine_divergence.integrations.trackers`.
        include: pattern of module names, or several; None is all.
        plain: also what the plain gradient implies, the interference and the self-check, at about two more passes of the layers.
        grad_scaler: the torch.amp.GradScaler, whose scale the captured gradients carry; without it a scale of 1 is assumed, and
            multipliers would be off by the scale. That of accelerate's optimizer is found.

    Attributes:
        last: the Diagnosis of the last step that was logged, None before. It has no loss and no counterfactual, and no ranks.
        steps: steps seen; those that are multiples of every are logged. Set it before attach to go on counting from a checkpoint.
            A step that a scaler skips is none; where the optimizer skips it by itself (fused=True), this is asked at those alone that
            would be logged, as asking holds up a GPU.

    Raises:
        TypeError: an argument is not what it should be, or the optimizer is a wrapper that runs no hooks and shows none that does.
        ValueError: every is below 1, include fits nothing, the optimizer has none of the model's parameters or is LBFGS, or path is
            a folder or in none.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> with Monitor(model, optimizer, every=2) as monitor:
    ...     for step in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(16, 4)).square().mean().backward()
    ...         optimizer.step()
    >>> monitor.last.step, [row.module for row in monitor.last.rows]
    (2, ['0', '2'])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 100,
        *,
        path: str | os.PathLike[str] | None = None,
        tracker: Tracker | None = None,
        include: str | Sequence[str] | None = None,
        plain: bool = True,
        grad_scaler: Scaler | None = None,
    ) -> None:
        check_runs_hooks(optimizer)
        optimizer, of_wrapper = unwrapped(optimizer)
        grad_scaler = of_wrapper if grad_scaler is None else grad_scaler
        check_monitored(model, optimizer, every, tracker, grad_scaler)
        if path is not None:
            check_path(Path(path))
        self.every = every
        self.steps = 0
        self.last: Diagnosis | None = None
        self._model = getattr(model, "_orig_mod", model)
        self._compiled = self._model is not model
        self._optimizer = optimizer
        self._path = None if path is None else Path(path)
        self._tracker = tracker
        self._plain = plain
        self._scaler = grad_scaler
        self._capture = Capture(find_layers(self._model, include), optimizer, failed=self._failed, dropped=self._dropped)
        self._before: Before | None = None
        self._skipped = False
        self._unstepped = Unstepped(optimizer)
        self._scale = 1.0
        self._shown = False
        self._entered = 0
        self._handles: list[RemovableHandle] = []

    def attach(self) -> Monitor:
        """Begin to listen; once is enough. An error leaves no hook."""
        if self._handles:
            return self
        try:
            self._capture.attach()
            self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        except BaseException:
            self.detach()
            raise
        self._unstepped.begin()
        self._capture.listening = self.steps % self.every == 0
        return self

    def detach(self) -> None:
        """Remove all hooks; `attach` goes on from there."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._capture.detach()
        self._before = None
        self._skipped = False

    def __enter__(self) -> Monitor:
        self.attach()
        self._entered += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered -= 1
        if not self._entered:
            self.detach()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._capture.listening or is_suspended():
            return
        try:
            self._skipped = _is_skipped(optimizer)
            if self._skipped:
                return
            self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
            layers = [layer for site in self._capture.found.sites for layer in site.layers]
            self._before = Before.of(optimizer, {part.parameter for layer in layers for part in layer.parts if part is not None})
            self._capture.settle()
        except Exception as error:
            self._failed(error)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or is_suspended():
            return
        self._unstepped.end()
        if self._skipped:  # the next backward drops what was captured
            self._skipped = False
            return
        try:
            if self._capture.listening and self._before is not None:
                if _has_closure(args, kwargs):
                    self._capture.settle_again()
                self._log(self._before)
        except Exception as error:
            self._failed(error)
        finally:
            self._before = None
            self._capture.drop()
            self.steps += 1
            self._capture.listening = self.steps % self.every == 0

    @torch.no_grad()
    def _log(self, before: Before) -> None:
        had = {p: p.grad for p in before.values if p.grad is not None}
        with without_autocast():
            told = stepped(
                self._model,
                self._capture,
                before,
                plain=self._plain,
                ranks=False,
                had=had,
                scaled=True,
                sampled=0 if self._path is None else 1,
                kept=_KEPT,
                loss_scale=self._scale,
                compiled=self._compiled,
            )
        self.last = Diagnosis(
            step=self.steps,
            about=about(
                self._model,
                self._optimizer,
                plain=self._plain,
                training=self._model.training,
                inputs=told.inputs(),
                loss_scale=self._scale,
            ),
            coverage=told.coverage,
            rows=told.rows,
            checks=told.checks,
            samples=told.samples,
        )
        for tell in (self._write, self._track):  # neither waits for the other to work
            try:
                tell(self.last)
            except Exception as error:
                self._failed(error)

    def _write(self, diagnosis: Diagnosis) -> None:
        if self._path is not None:
            append(diagnosis, self._path)

    def _track(self, diagnosis: Diagnosis) -> None:
        if self._tracker is not None:
            self._tracker(aggregates(diagnosis.rows), diagnosis.step)

    def _failed(self, error: Exception) -> None:
        if self._shown:
            return
        self._shown = True
        _warn(f"the diagnosis failed at step {self.steps} and training goes on; shown once: {type(error).__name__}: {error}")

    def _dropped(self, layer: Layer) -> None:
        if self._unstepped.dropped(layer):
            _warn(
                f"nothing is diagnosed: step() of {type(self._optimizer).__name__} was never called, while {ENOUGH} times parameters "
                "changed and their gradient was dropped; give the Monitor the optimizer whose step() is called"
                f"{held_by(self._optimizer)} (one that torch.compile compiled is not seen)"
            )


def aggregates(rows: Iterable[Row]) -> dict[str, float]:
    """What a tracker gets: medians over the rows of a diagnosis, the worst share uphill, and how many layers want a look."""
    rows = list(rows)
    found = {
        "alignment": _median(row.alignment_median for row in rows),
        "uphill_worst": max((row.below_zero for row in rows if math.isfinite(row.below_zero)), default=math.nan),
        "efficiency": _median(row.efficiency for row in rows),
        "multiplier_cv": _median(row.multiplier_cv for row in rows),
        "interference": _median(row.interference for row in rows),
        "update_ratio": _median(row.update_ratio for row in rows),
        "layers_look": float(sum(row.verdict == "look" for row in rows)),
        "layers_broken": float(sum(row.verdict == "broken" for row in rows)),
    }
    return {f"affine_divergence/{name}": value for name, value in found.items() if math.isfinite(value)}


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _warn(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:  # warnings are errors here: not a reason to stop a training
        print(f"affine_divergence: {text}", file=sys.stderr)


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Of a step, by what it was called with: the optimiser, and what else there was."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def _is_skipped(optimizer: Any) -> bool:
    """Whether a GradScaler found that gradients are not finite and leaves it to the optimiser, as to a fused one, to do nothing."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
