# affdiv diagnose: how far one training step of a model is from the ideal one, layer by layer.
from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import affine_divergence
from affine_divergence.cli._batch import Batch
from affine_divergence.cli._named import told
from affine_divergence.cli._setup import SEED, given, on_device, optimizer_of
from affine_divergence.lab.devices import check_device
from affine_divergence.lab.errors import BadInputError, first_line
from affine_divergence.lab.examples import EXAMPLES, example as made_example

if TYPE_CHECKING:
    import torch

    from affine_divergence.diagnostics import Diagnosis


def diagnose(
    model: str | None = None,
    /,
    *,
    batch: Annotated[str | None, Parameter(help="File .pt or .npz, or package.module:make_batch: inputs and targets.")] = None,
    loss: Annotated[
        str | None, Parameter(help="Name in torch.nn.functional, or package.module:loss of (output, targets); else the output's own loss.")
    ] = None,
    optimizer: Annotated[
        str | None, Parameter(help="Name in torch.optim, as AdamW, or package.module:make_optimizer of the parameters; SGD without it.")
    ] = None,
    lr: Annotated[float | None, Parameter(help="Learning rate; for SGD 1 if not given, for others that of torch.")] = None,
    example: Annotated[str | None, Parameter(help=f"A built-in network instead of MODEL, batch and loss: {', '.join(EXAMPLES)}.")] = None,
    out: Annotated[Path | None, Parameter(help="Folder to write diagnosis.html and diagnosis.jsonl to.")] = None,
    from_: Annotated[Path | None, Parameter(name="--from", help="File of a diagnosis or a Monitor, shown instead of a new one.")] = None,
    counterfactual: Annotated[bool, Parameter(help="What each correction would do on the same batch.")] = True,
    include: Annotated[
        list[str] | None, Parameter(negative=(), consume_multiple=True, help="Patterns of the names of the modules to measure.")
    ] = None,
    device: Annotated[str, Parameter(help="Where to run the model: cpu, cuda, cuda:1, …, mps.")] = "cpu",
) -> None:
    """Diagnose one training step of a model: what it does to the activations of every layer, and what each correction would do.

    Random numbers are seeded before the model is made: the same command says the same. Without anything the ways to call it are listed.

    Parameters
    ----------
    model
        package.module:make_model or path/to/file.py:make_model, a function without arguments or a torch.nn.Module. The current
        folder can be imported from. The model is run in the mode it comes in.
    """
    step = {"MODEL": model, "--batch": batch, "--loss": loss, "--example": example, "--optimizer": optimizer, "--lr": lr}
    how = {"--no-counterfactual": None if counterfactual else True, "--include": include, "--device": device if device != "cpu" else None}
    asked = [name for name, value in {**step, **how, "--from": from_}.items() if value is not None]
    if not asked and out is None:
        print(_ways())
        return
    if from_ is not None:
        _refuse(asked, "--from")
        found = _loaded(from_)
    else:
        if example is not None:
            _refuse(asked, "--example", "--optimizer", "--lr", *how)
            if example not in EXAMPLES:
                raise BadInputError(f"there is no example {example}; there are: {', '.join(EXAMPLES)}")
        _check(lr, optimizer, include)
        check_device(device)
        network, read, loss_fn = given(model, batch, loss) if example is None else _example(example)
        there = on_device(network, read, device)
        chosen = optimizer_of(optimizer, lr, network)
        options = {"optimizer": chosen, "lr": lr if chosen is None else None, "include": include, "counterfactual": counterfactual}
        found = [_diagnosed(network, there, loss_fn, options)]
    print(found[-1])
    if out is not None:
        _write(found, out, table=from_ is None)


def _ways() -> str:
    width = max(map(len, EXAMPLES))
    return "\n".join(
        [
            "a model of yours   affdiv diagnose package.module:make_model --batch batch.pt --loss cross_entropy --optimizer SGD --lr 0.1",
            "one in a file      affdiv diagnose path/to/file.py:make_model --batch path/to/file.py:make_batch --loss mse_loss",
            "with its own loss  affdiv diagnose package.module:make_model --batch batch.npz",
            "the page again     affdiv diagnose --from diagnosis.jsonl --out FOLDER",
            "an example         affdiv diagnose --example mlp --optimizer Adam --lr 1e-3 --out FOLDER",
            "",
            "examples, each on 128 of scikit-learn's digits, at initialisation:",
            *(f"  {name:<{width}}  {what}" for name, what in EXAMPLES.items()),
            "",
            "affdiv diagnose --help describes every option",
        ]
    )


def _refuse(asked: Sequence[str], option: str, *allowed: str) -> None:
    others = [name for name in asked if name not in (option, *allowed)]
    if others:
        raise BadInputError(f"{option} says what to diagnose; leave out {' and '.join(others)}, or {option}")


def _check(lr: float | None, optimizer: str | None, include: Sequence[str] | None) -> None:
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        raise BadInputError(f"--lr must be positive and finite, got {lr:g}")
    if lr is not None and optimizer is not None and ":" in optimizer:
        raise BadInputError(f"--optimizer {optimizer} sets its own learning rate; leave out --lr")
    if include is not None and not (include and all(include)):
        got = "an empty one" if include else "none"
        raise BadInputError(f"--include wants a pattern of names of modules, or several; got {got}: leave --include out to measure all")


def _example(name: str) -> tuple[torch.nn.Module, Batch, Callable[..., Any]]:
    made = made_example(name)
    return made.model, Batch(made.inputs, made.targets), made.loss_fn


def _diagnosed(model: torch.nn.Module, batch: Batch, loss_fn: Callable[..., Any] | None, options: Mapping[str, Any]) -> Diagnosis:
    import torch

    from affine_divergence.diagnostics import diagnose as diagnosis_of

    torch.manual_seed(SEED)  # the masks of dropout
    try:
        return diagnosis_of(model, batch.inputs, batch.targets, loss_fn, **options)
    except SystemExit as error:
        raise BadInputError(f"the step raised {told(error)}") from error
    except Exception as error:
        if not Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(affine_divergence.__file__).parent):
            raise BadInputError(f"the step raised {told(error)}") from error  # in the model, the loss or the optimiser
        if isinstance(error, (TypeError, ValueError, RuntimeError)):  # the diagnosis says what it cannot work on
            raise BadInputError(str(error).replace("loss_fn", "--loss")) from error
        raise


def _loaded(path: Path) -> list[Diagnosis]:
    from affine_divergence.diagnostics import load

    try:
        found = load(path)
    except OSError as error:
        raise BadInputError(f"--from {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInputError(f"--from {path}: {first_line(error)}") from error
    if not found:
        raise BadInputError(f"--from {path} holds no diagnosis that was written to its end")
    return found


def _write(found: Sequence[Diagnosis], out: Path, *, table: bool) -> None:
    from affine_divergence.diagnostics._page import write_page

    page = out / "diagnosis.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if table:
            found[-1].save(out / "diagnosis.jsonl")
        write_page(found, page)
    except OSError as error:
        raise BadInputError(f"cannot write to {out}: {error.strerror or error}; name another folder with --out") from error
    print(f"page: {page}")
