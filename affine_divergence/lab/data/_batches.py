# CIFAR-10 as the Python batches of its authors: pickles, read without running anything they ask for.
from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

from affine_divergence.lab.errors import BadInputError, first_line

from ._source import Item, Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST = ("test_batch",)
_FOLDER = "cifar-10-batches-py"


def find_batches(path: Path) -> list[Source]:
    """The sources of this form: the folder itself, or cifar-10-batches-py in it."""
    sources = []
    for root in (path, path / _FOLDER):
        missing = [name for name in TRAIN + TEST if not (root / name).is_file()]
        if not missing:
            train, test = (tuple(root / name for name in names) for names in (TRAIN, TEST))
            sources.append(Source("Python batches", root, train, test, read_batch))
        elif len(missing) < len(TRAIN + TEST):
            names = ", ".join(missing)
            raise BadInputError(f"{root}: wanted data_batch_1 … data_batch_5 and test_batch, found no {names}; unpack the archive again")
    return sources


def read_batch(path: Path) -> Iterator[Item]:
    return read_content(path, path.read_bytes())


def read_content(path: Path, content: bytes) -> Iterator[Item]:
    """The images of a batch that was read already; the path is for messages."""
    images, labels = _arrays(path, content)
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield Item(f"{path}, row {row}", image, label)


def _arrays(path: Path, content: bytes) -> tuple[NDArray[np.uint8], list[int]]:
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except _RefusedError as error:
        raise BadInputError(f"{path}: refused, its pickle asks for {error}, which no CIFAR-10 batch needs; use a copy you trust") from error
    except Exception as error:  # a broken pickle can raise anything
        raise BadInputError(f"{path}: not a whole pickle ({first_line(error)}); unpack the archive again") from error
    data, labels = (batch.get(key) for key in (b"data", b"labels")) if isinstance(batch, dict) else (None, None)
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072):
        raise BadInputError(f"{path}: wanted b'data', a uint8 array (n, 3072), found {_describe(data)}; is it a CIFAR-10 batch?")
    if isinstance(labels, np.ndarray):
        labels = labels.tolist()
    if not (isinstance(labels, list) and len(labels) == len(data) and all(type(label) is int for label in labels)):
        raise BadInputError(f"{path}: wanted b'labels', {len(data)} integers, found {_describe(labels)}; is it a CIFAR-10 batch?")
    return data.reshape(-1, 3, 32, 32), labels


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "none" if value is None else type(value).__name__


class _RefusedError(Exception):
    pass


class _ArraysOnly(pickle.Unpickler):
    # A pickle may call any function it names. These few are what arrays need, under numpy 1's and numpy 2's names.
    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): _latin1,
        }
        # Taken from an array, since importing numpy.core warns under numpy 2 and numpy._core is missing under numpy 1.
        array = np.zeros(1, np.uint8)
        for core in ("numpy.core", "numpy._core"):
            allowed[f"{core}.multiarray", "_reconstruct"] = array.__reduce__()[0]
            allowed[f"{core}.numeric", "_frombuffer"] = array.__reduce_ex__(5)[0]
        if (module, name) not in allowed:
            raise _RefusedError(f"{module}.{name}")
        return allowed[module, name]


def _latin1(text: str, encoding: str) -> bytes:
    # How protocols below 3 spell bytes; other codecs have no business here.
    if encoding != "latin1":
        raise _RefusedError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")
