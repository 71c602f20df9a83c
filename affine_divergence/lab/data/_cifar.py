# CIFAR-10 from any of its forms on disk to arrays: found, checked, decoded, brought into one order.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from affine_divergence.lab.errors import BadInputError

from ._archived import archive_source, find_archive
from ._batches import find_batches
from ._cache import downloads_folder
from ._folders import find_folders
from ._images import decode, encoding
from ._names import FORMS
from ._order import hash_order
from ._parquet import find_parquet

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ._source import Source

CLASSES = 10
EXPECTED = {"train": 50_000, "test": 10_000}


def find(name: str, path: Path | None) -> Source:
    """The one source at a path, of whatever form."""
    if path is None:
        return _downloaded(name)
    if not path.exists():
        raise BadInputError(f"{path}: no such folder; wanted a folder with {FORMS}")
    if not path.is_dir():
        return archive_source(path)
    sources = _in_folder(path)
    if not sources:
        entries = sorted(entry.name for entry in path.iterdir())
        found = ", ".join(entries[:5]) + (", …" if len(entries) > 5 else "") if entries else "an empty folder"
        raise BadInputError(f"{path}: wanted {FORMS}; found {found}")
    if len(sources) > 1:
        several = " and ".join(f"{source.form} in {source.root}" for source in sources)
        raise BadInputError(f"{path}: wanted one source, found {several}; give the folder of one, or move the other away")
    return sources[0]


def _in_folder(path: Path) -> list[Source]:
    # An archive beside what was unpacked from it is no second source.
    return [*find_parquet(path), *find_folders(path), *find_batches(path)] or find_archive(path)


def _downloaded(name: str) -> Source:
    way = f"write --data {name}=PATH, PATH a folder with {FORMS}"
    if name != "cifar10":
        raise BadInputError(f"{name} is not embedded and needs a path: {way}")
    folder = downloads_folder(name)
    sources = _in_folder(folder) if folder.is_dir() else []
    if not sources:
        raise BadInputError(f"{name} is not embedded and not in {folder}: affdiv data {name} --download brings it there, or {way}")
    return sources[0]


def decode_source(name: str, path: Path, source: Source) -> dict[str, NDArray[Any]]:
    """All images and labels of a source, by the names of Dataset's fields."""
    arrays: dict[str, NDArray[Any]] = {}
    first: str | None = None
    for split, files in (("train", source.train), ("test", source.test)):
        expected, count = EXPECTED[split], 0
        images = np.empty((expected, 3, 32, 32), np.uint8)
        labels = np.empty(expected, np.int64)
        for item in (item for file in files for item in source.read(file)):
            if count < expected:
                kind = encoding(item.image, item.place)
                if first is None:
                    first = kind
                    _check_kind(name, path, kind)
                elif kind != first:
                    raise BadInputError(f"{item.place}: a {kind} image among {first} images; wanted one encoding throughout")
                if not 0 <= item.label < CLASSES:
                    raise BadInputError(f"{item.place}: wanted a label from 0 to {CLASSES - 1}, found {item.label}; is it CIFAR-10?")
                images[count], labels[count] = decode(item.image, item.place), item.label
            count += 1
        if count != expected:
            raise BadInputError(
                f"{path}: wanted {expected} {split} images, found {count} ({source.form}): truncated or wrong; use a whole copy of CIFAR-10"
            )
        order = hash_order(images, labels)
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[order], labels[order]
    return arrays


def _check_kind(name: str, path: Path, kind: str) -> None:
    right = "cifar10-jpeg" if kind == "JPEG" else "cifar10"
    if name != right:
        loss = "lossy JPEG" if kind == "JPEG" else f"lossless ({kind})"
        raise BadInputError(f"{path}: its images are {loss}, which is called {right}, not {name}; write --data {right}={path}")
