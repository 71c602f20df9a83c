# The cache of decoded data sets: a folder each, memory-mapped, written beside its place and renamed into it.
from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._dataset import Dataset
from ._digest import digest_arrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIELDS = ("train_images", "train_labels", "test_images", "test_labels")
_LOG = logging.getLogger(__name__)


class DamagedError(Exception):
    """A cached data set is there but cannot be used."""


def default_folder() -> Path:
    """$XDG_CACHE_HOME/affine-divergence, or ~/.cache/affine-divergence."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the XDG specification.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "affine-divergence"


def downloads_folder(name: str) -> Path:
    """Where `affdiv data NAME --download` puts a data set, and where it is looked for: in the default folder, whatever cache is in use."""
    return default_folder() / "downloads" / name


def read(folder: Path) -> Dataset | None:
    """The data set in a cache folder, None if the folder is not there; DamagedError if its arrays are not the ones written."""
    try:
        if not folder.exists():
            return None
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {field: np.load(folder / f"{field}.npy", mmap_mode="r", allow_pickle=False) for field in _FIELDS}
        dataset = Dataset(name=meta["name"], digest=meta["digest"], classes=meta["classes"], **arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DamagedError(str(error)) from error
    # Hashing all of it takes 0.2 s, and a record must not name pixels that it did not use.
    if digest_arrays(arrays.values()) != dataset.digest:
        raise DamagedError("its arrays do not have its digest")
    return dataset


def write(folder: Path, name: str, arrays: dict[str, NDArray[Any]], classes: int) -> Dataset:
    """Stores arrays under a folder's name and returns the data set in it: another process's if that came first.

    Where nothing can be written the data set stays in memory, with a warning.
    """
    digest = digest_arrays(arrays[field] for field in _FIELDS)
    temporary = _beside(folder)
    try:
        temporary.mkdir(parents=True)
        for field in _FIELDS:
            np.save(temporary / f"{field}.npy", arrays[field])
        (temporary / "meta.json").write_text(json.dumps({"name": name, "digest": digest, "classes": classes}))
        _publish(temporary, folder)
        dataset = read(folder)
        if dataset is not None:
            return dataset
    except (OSError, DamagedError) as error:
        _LOG.warning("cannot keep decoded %s in %s (%s): it is decoded anew each time", name, folder.parent, error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for array in arrays.values():
        array.flags.writeable = False
    return Dataset(name=name, digest=digest, classes=classes, **arrays)


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)  # fails if a folder with files is there
        return
    except OSError:
        try:
            if read(folder) is not None:
                return  # another process was first
        except DamagedError:
            pass
    # Damaged: out of the way under a name of its own, so that no reader meets half a folder.
    aside = _beside(folder)
    aside.mkdir()
    try:
        folder.rename(aside / "damaged")
        temporary.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _beside(folder: Path) -> Path:
    # Not tempfile.mkdtemp: its folders are closed to other users, and a cache may be shared.
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
