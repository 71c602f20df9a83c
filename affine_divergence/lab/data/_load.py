# Loading a data set by name, through the cache where decoding takes time.
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from affine_divergence.lab.errors import BadInputError

from . import _cache, _cifar, _fashion
from ._digest import digest_files
from ._digits import load_digits
from ._fashion import IdxFiles
from ._names import check_name

if TYPE_CHECKING:
    from pathlib import Path

    from ._dataset import Dataset
    from ._source import Source

# Part of the cache's key: raise it when the same files would give other arrays.
_VERSION = 1
_LOG = logging.getLogger(__name__)


def load(name: str, path: Path | None = None, *, cache: Path | None = None) -> Dataset:
    """A data set by name, read from `path`, decoded the first time and memory-mapped from then on.

    Without a path cifar10 is looked for where `affdiv data cifar10 --download` puts it, fashion-mnist where Debian's package does.

    `cache` is where decoded images are kept, by default $XDG_CACHE_HOME/affine-divergence or ~/.cache/affine-divergence.
    Raises BadInputError for everything that is wrong with the name, the path or a file in it.

    >>> digits = load("digits")
    >>> digits.train_images.shape, digits.test_images.shape, digits.classes
    ((1437, 1, 8, 8), (360, 1, 8, 8), 10)
    """
    check_name(name)
    if name == "digits":
        if path is not None:
            raise BadInputError(f"digits is embedded and takes no path, {path} came; write --data digits")
        return load_digits()
    try:
        return _load_from(name, path, _find(name, path), cache or _cache.default_folder())
    except OSError as error:
        raise _unreadable(error, path) from error


def locate(name: str, path: Path | None = None) -> str:
    """What `load` would read and where, in words; the same errors."""
    check_name(name)
    if name == "digits":
        return "embedded in scikit-learn"
    try:
        source = _find(name, path)
    except OSError as error:
        raise _unreadable(error, path) from error
    return f"{source.form}, {source.root}"


def _find(name: str, path: Path | None) -> Source | IdxFiles:
    return _fashion.find(path) if name == "fashion-mnist" else _cifar.find(name, path)


def _load_from(name: str, path: Path | None, source: Source | IdxFiles, cache: Path) -> Dataset:
    folder = cache / f"{name}-{digest_files(source.root, source.on_disk)}-v{_VERSION}"
    try:
        dataset = _cache.read(folder)
        if dataset is not None:
            return dataset
    except _cache.DamagedError as error:
        _LOG.warning("the cached %s in %s is damaged (%s): it is decoded again", name, folder, error)
    if isinstance(source, IdxFiles):
        return _cache.write(folder, name, _fashion.decode_files(source), _fashion.CLASSES)
    return _cache.write(folder, name, _cifar.decode_source(name, path or source.root, source), _cifar.CLASSES)


def _unreadable(error: OSError, path: Path | None) -> BadInputError:
    return BadInputError(f"cannot read {error.filename or path}: {error.strerror or error}")
