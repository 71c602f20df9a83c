# Whether what a diagnosis and a monitor are given can be worked with; else an error that says what was wanted, what came, and the way out.
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from affine_divergence.diagnostics._wrappers import held_by, runs_hooks, unwrapped


def check_step(model: Any, targets: Any, loss_fn: Any, optimizer: Any, lr: Any) -> None:
    """What a diagnosis is given."""
    check_model(model)
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


def check_loss(loss: Any) -> None:
    """What a loss gave."""
    if not torch.is_tensor(loss):
        raise TypeError(f"the loss must be a tensor, got {type(loss).__name__}")
    if loss.dim() != 0:
        raise ValueError(f"the loss must be a scalar, got shape {tuple(loss.shape)}; reduce it by .mean() or .sum()")
    if not loss.requires_grad:
        raise ValueError("the loss depends on no parameter that learns: nothing would move")


def check_path(path: Path) -> None:
    """Where a monitor is to write."""
    if path.is_dir():
        raise ValueError(f"path must be a file to append to, {path} is a folder; name a file in it, as {path / 'diagnosis.jsonl'}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"path: there is no folder {path.parent} to write {path.name} in; make it first")


def check_runs_hooks(optimizer: Any) -> None:
    """Hooks are all that a monitor sees of an optimiser."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; of a wrapper give the one inside")
    inner, _ = unwrapped(optimizer)
    if not runs_hooks(inner):
        raise TypeError(
            f"optimizer must run step hooks, {type(inner).__name__} was never initialised as a torch.optim.Optimizer and runs none; "
            f"give the one inside whose step() it calls{held_by(inner)}"
        )


def check_monitored(model: Any, optimizer: Any, every: Any, tracker: Any, grad_scaler: Any) -> None:
    """What a monitor is given, with the optimiser inside of a wrapper."""
    check_model(model)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every must be a whole number of steps, got {type(every).__name__}")
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if tracker is not None and not callable(tracker):
        raise TypeError(
            f"tracker must be a function of (values, step), got {type(tracker).__name__}; "
            "of a SummaryWriter make one by affine_divergence.integrations.trackers.TensorBoard"
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {type(grad_scaler).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS takes several gradients in a step, none of which is that of the step; affine_divergence.diagnose works")
    check_trains(optimizer, model)


def check_trains(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """An optimiser of other parameters than the model's moves none of them."""
    if not {p for group in optimizer.param_groups for p in group["params"]} & set(model.parameters()):
        raise ValueError("optimizer has none of the model's parameters; give the one that trains this model, built from model.parameters()")


def check_model(model: Any) -> None:
    """What is to be looked at."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
