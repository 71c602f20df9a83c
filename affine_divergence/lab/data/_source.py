# A source of CIFAR-10 images on disk: its files and how one of them is read, whatever its form.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


class Item(NamedTuple):
    """One image: where it lies (for messages), its encoded bytes or its pixels (3, 32, 32), its label."""

    place: str
    image: bytes | NDArray[np.uint8]
    label: int


@dataclass(frozen=True)
class Source:
    """Files below `root` in the order they are read, and the reader of one; if they lie in an archive, that."""

    form: str
    root: Path
    train: tuple[Path, ...]
    test: tuple[Path, ...]
    read: Callable[[Path], Iterator[Item]]
    archive: Path | None = None

    @property
    def on_disk(self) -> tuple[Path, ...]:
        return self.train + self.test if self.archive is None else (self.archive,)
