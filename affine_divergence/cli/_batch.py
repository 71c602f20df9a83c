# The batch that a user names: a .pt or .npz file, or a function; inputs as the model takes them, and targets if there are any.
from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from affine_divergence.cli._named import called, named
from affine_divergence.lab.errors import BadInputError, first_line

if TYPE_CHECKING:
    import torch

WAYS = "a file .pt or .npz, or a function package.module:make_batch"


class Batch(NamedTuple):
    """inputs: a tensor, a tuple of positional arguments or a dict of keyword ones; targets: None where there are none."""

    inputs: Any
    targets: Any


def read_batch(text: str) -> Batch:
    """The batch of a file or of a function without arguments.

    A tensor is the inputs; a pair is inputs and targets; of a dict the entry `targets` is the targets, and the inputs are the
    entry `inputs`, or without one all other entries, as keyword arguments.
    """
    suffix = Path(text).suffix
    if suffix in (".pt", ".pth"):
        return _parted(_of_torch(Path(text)), f"--batch {text}")
    if suffix == ".npz":
        return _parted(_of_numpy(Path(text)), f"--batch {text}")
    if ":" not in text:
        raise BadInputError(f"--batch is {text!r}; give {WAYS}")
    made = named(text, "--batch")
    return _parted(called(made, f"--batch {text}") if callable(made) else made, f"--batch {text}")


def _parted(value: Any, what: str) -> Batch:
    import torch

    if isinstance(value, torch.Tensor):
        return Batch(value, None)
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise BadInputError(f"{what} has {len(value)} parts; wanted are two: inputs and targets")
        return Batch(_checked(value[0], what), value[1])
    if not isinstance(value, Mapping):
        raise BadInputError(f"{what} is of type {type(value).__name__}; wanted is a tensor, a pair (inputs, targets) or a dict")
    rest = {name: entry for name, entry in value.items() if name != "targets"}
    if not rest:
        raise BadInputError(f"{what} holds no inputs; its entries are: {', '.join(map(str, value)) or 'none'}")
    if "inputs" not in rest:
        return Batch(rest, value.get("targets"))
    inputs = rest.pop("inputs")
    if rest:
        raise BadInputError(f"{what} holds inputs and also {', '.join(map(str, rest))}; give all inputs as keywords of the model, or one")
    return Batch(_checked(inputs, what), value.get("targets"))


def _checked(inputs: Any, what: str) -> Any:
    import torch

    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        raise BadInputError(f"{what}: the inputs are of type {type(inputs).__name__}; wanted is a tensor, a tuple or a dict of tensors")
    return inputs


def _of_torch(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise BadInputError(f"--batch {path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise BadInputError(
            f"--batch {path} holds more than tensors, tuples, lists and dicts, or is no file of torch.save; "
            "what could run code when read is not read: save tensors, or give a function package.module:make_batch"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise BadInputError(f"--batch {path} cannot be read as a file of torch.save: {first_line(error)}") from error


def _of_numpy(path: Path) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch

    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is one array, not an archive")
        with archive:
            return {name: torch.from_numpy(_plain(archive[name], name)) for name in archive.files}
    except OSError as error:
        raise BadInputError(f"--batch {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise BadInputError(f"--batch {path} cannot be read as numbers of numpy.savez: {first_line(error)}") from error


def _plain(array: Any, name: str) -> Any:
    # numpy's numbers are float64 where nobody chose, and labels of any width: models have float32, and losses int64.
    import numpy as np

    kinds = {"f": "float32", "i": "int64", "u": "int64"}
    if array.dtype.kind not in kinds:
        return array
    wanted = kinds[array.dtype.kind]
    with np.errstate(over="ignore"):
        narrow = array.astype(wanted)
    beyond = narrow < 0 if array.dtype.kind == "u" else np.isinf(narrow) & np.isfinite(array)
    if beyond.any():
        raise ValueError(f"{name} holds {array[beyond].flat[0]}, which {wanted} has not; scale it, or give a function")
    return narrow
