# CIFAR-10 as class folders: train/CLASS/*.png and test/CLASS/*.png (or .jpg).
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.lab.errors import BadInputError

from ._source import Item, Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# In alphabetical order, which is CIFAR-10's own.
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SUFFIXES = (".png", ".jpg", ".jpeg")


def find_folders(path: Path) -> list[Source]:
    """The source of this form in a folder: none, or one."""
    roots = [path / split for split in ("train", "test")]
    there = [root for root in roots if root.is_dir()]
    if not there:
        return []
    for root in roots:
        if root not in there:
            raise BadInputError(f"{path}: wanted the folders train and test, found no {root.name}; add it")
    train, test = (_images(root) for root in roots)
    return [Source("class folders", path, train, test, read_image_file)]


def read_image_file(path: Path) -> Iterator[Item]:
    yield Item(str(path), path.read_bytes(), CLASSES.index(path.parent.name))


def _images(root: Path) -> tuple[Path, ...]:
    names = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
    if names != list(CLASSES):
        odd = [f"no {name}" for name in CLASSES if name not in names] + [f"also {name}" for name in names if name not in CLASSES]
        raise BadInputError(f"{root}: wanted the ten folders {', '.join(CLASSES)}; found {', '.join(odd)}")
    files = []
    for name in CLASSES:
        for file in sorted((root / name).iterdir()):
            if file.name.startswith("."):
                continue
            if file.suffix.lower() not in _SUFFIXES:
                raise BadInputError(f"{file}: wanted images only ({', '.join(_SUFFIXES)}); move it away")
            files.append(file)
    return tuple(files)
