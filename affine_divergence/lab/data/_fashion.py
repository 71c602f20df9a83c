# Fashion-MNIST from its four IDX files to arrays: found, checked, brought into one order.
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from affine_divergence.lab.errors import BadInputError

from ._digest import digest_arrays
from ._idx import read_idx
from ._order import hash_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES = 10
SIDE = 28
EXPECTED = {"train": 60_000, "test": 10_000}
# MNIST, KMNIST and Fashion-MNIST have files of the same names, shapes and sizes. This is of Debian's dataset-fashion-mnist.
DIGEST = "475596a4df190dcf"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FILES = {"train": "train", "test": "t10k"}
_DEPTH = 2
_WANTED = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, each with or without .gz"


@dataclass(frozen=True)
class IdxFiles:
    """The files of images and labels below `root`."""

    root: Path
    train: tuple[Path, Path]
    test: tuple[Path, Path]
    form: str = "IDX files"

    @property
    def on_disk(self) -> tuple[Path, ...]:
        return self.train + self.test


def find(path: Path | None) -> IdxFiles:
    """The four files in a folder or up to two levels below it; without a path, where Debian's package puts them."""
    if path is None:
        path = DEBIAN
        if not path.exists():
            raise BadInputError(
                f"fashion-mnist is not at {DEBIAN}; install Debian's package dataset-fashion-mnist, "
                f"or write --data fashion-mnist=PATH, PATH a folder with {_WANTED}"
            )
    if not path.exists():
        raise BadInputError(f"{path}: no such folder; wanted a folder with {_WANTED}")
    if not path.is_dir():
        raise BadInputError(f"{path}: a file; wanted the folder that holds {_WANTED}")
    roots = sorted({file.parent for level in range(_DEPTH + 1) for file in path.glob("*/" * level + "train-images*idx3-ubyte*")})
    if not roots:
        raise BadInputError(f"{path}: wanted {_WANTED}; found no train-images-idx3-ubyte there or up to two levels below")
    if len(roots) > 1:
        raise BadInputError(f"{path}: wanted one source, found several in {' and '.join(map(str, roots))}; give the folder of one")
    train, test = (
        (_file(roots[0], f"{name}-images", "idx3-ubyte"), _file(roots[0], f"{name}-labels", "idx1-ubyte")) for name in _FILES.values()
    )
    return IdxFiles(roots[0], train, test)


def decode_files(source: IdxFiles) -> dict[str, NDArray[Any]]:
    """All images and labels, by the names of Dataset's fields."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, (images_file, labels_file) in (("train", source.train), ("test", source.test)):
        n = EXPECTED[split]
        images = read_idx(images_file, (n, SIDE, SIDE)).reshape(n, 1, SIDE, SIDE)
        labels = read_idx(labels_file, (n,)).astype(np.int64)
        wrong = np.flatnonzero(labels >= CLASSES)
        if len(wrong):
            raise BadInputError(
                f"{labels_file}, row {wrong[0]}: wanted a label from 0 to {CLASSES - 1}, found {labels[wrong[0]]}; is it Fashion-MNIST?"
            )
        order = hash_order(images, labels)
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[order], labels[order]
    digest = digest_arrays(arrays.values())
    if digest != DIGEST:
        raise BadInputError(
            f"{source.root}: whole IDX files, but other images or labels than Fashion-MNIST's (digest {digest}, not {DIGEST}); "
            "MNIST and KMNIST have files of the same names: use those of Fashion-MNIST"
        )
    return arrays


def _file(root: Path, start: str, end: str) -> Path:
    # Packed files first, since they have a checksum; torchvision leaves both forms side by side. Some copies write a dot for the dash.
    names = [f"{start}{separator}{end}{suffix}" for suffix in (".gz", "") for separator in "-."]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise BadInputError(f"{root}: wanted {start}-{end} or {start}-{end}.gz, found neither; add it")
