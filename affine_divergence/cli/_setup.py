# What a step is diagnosed of, by the names that a user gives: the model, its loss, its optimiser.
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from affine_divergence.cli._batch import WAYS, Batch, read_batch
from affine_divergence.cli._named import called, named
from affine_divergence.lab.errors import BadInputError

if TYPE_CHECKING:
    import torch

SEED = 0


def given(model: str | None, batch: str | None, loss: str | None) -> tuple[torch.nn.Module, Batch, Callable[..., Any] | None]:
    import torch

    if model is None:
        raise BadInputError("there is no MODEL; give package.module:make_model or file.py:make_model, or an --example")
    if batch is None:
        raise BadInputError(f"the model needs a --batch: {WAYS}")
    loss_fn = None if loss is None else _loss(loss)  # names are checked before anything of the user's runs for long
    torch.manual_seed(SEED)
    made = named(model, "MODEL")
    torch.manual_seed(SEED)  # whatever else the module drew when it was imported
    network = made if isinstance(made, torch.nn.Module) else called(_function(made, f"MODEL {model}"), f"MODEL {model}")
    if not isinstance(network, torch.nn.Module):
        raise BadInputError(f"MODEL {model} gives a value of type {type(network).__name__}; wanted is a torch.nn.Module")
    read = read_batch(batch)
    if loss_fn is None and read.targets is not None:
        raise BadInputError(
            f"--batch {batch} has targets, which only a --loss compares with; give one, or name the entry as the model does"
        )
    if loss_fn is not None and ":" not in str(loss) and read.targets is None:
        raise BadInputError(f"--loss {loss} compares the output with targets, --batch {batch} has none; give it an entry targets")
    return network, read, loss_fn


def _function(made: Any, what: str) -> Callable[..., Any]:
    if not callable(made):
        raise BadInputError(f"{what} is of type {type(made).__name__}; wanted is a function")
    function: Callable[..., Any] = made
    return function


def _loss(text: str) -> Callable[..., Any]:
    if ":" in text:
        made = _function(named(text, "--loss"), f"--loss {text}")
        return _function(called(made, f"--loss {text}"), f"--loss {text}()") if isinstance(made, type) else made
    from torch.nn import functional

    known = dict(_losses(functional))
    if text not in known:
        raise BadInputError(
            f"--loss {text} is no loss of (input, target) in torch.nn.functional; there are {', '.join(sorted(known))}, "
            "or write package.module:loss"
        )
    return known[text]


def _losses(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in vars(module).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            parameters = list(inspect.signature(function).parameters.values())
            if [p.name for p in parameters[:2]] == ["input", "target"] and all(p.default is not p.empty for p in parameters[2:]):
                yield name, function


def optimizer_of(text: str | None, lr: float | None, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    if text is None:
        return None
    import torch

    base = torch.optim.Optimizer
    optimizers = {
        name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, base) and kind != base
    }
    if ":" not in text and text not in optimizers:
        raise BadInputError(
            f"--optimizer {text} is not in torch.optim; there are {', '.join(sorted(optimizers))}, or write package.module:make_optimizer"
        )
    what = f"--optimizer {text}"
    if ":" in text:
        made = called(_function(named(text, "--optimizer"), what), what, model.parameters())
    else:
        kind, options = optimizers[text], dict[str, Any]() if lr is None else {"lr": lr}
        made = called(lambda: kind(model.parameters(), **options), what)
    if not isinstance(made, torch.optim.Optimizer):
        raise BadInputError(f"{what} gives a value of type {type(made).__name__}; wanted is a torch.optim.Optimizer")
    return made


def on_device(network: torch.nn.Module, batch: Batch, device: str) -> Batch:
    """The batch there, and the network too; both may be of classes of the user's."""
    from affine_divergence.diagnostics._inputs import mapped

    called(network.to, f"MODEL, moved to {device},", device)
    there: Batch = called(mapped, f"--batch, moved to {device},", batch, lambda tensor: tensor.to(device))
    return there
