# CIFAR-10 straight from its official archive, which is not unpacked but must have its checksum before anything in it is read.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.lab.errors import BadInputError

from ._batches import TEST, TRAIN, read_content
from ._names import FORMS
from ._pinned import ARCHIVES, WrongFileError, check
from ._source import Item, Source
from ._tarball import read_members

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ._pinned import Archive


def archive_source(path: Path) -> Source:
    """The source that is one file; of another length than the archive's it is refused at once."""
    archive = ARCHIVES["cifar10"]
    size = path.stat().st_size
    if size != archive.size:
        raise _not_it(path, archive, f"a file of {size:,} bytes")
    train, test = (tuple(path / archive.folder / name for name in names) for names in (TRAIN, TEST))
    return Source("the official archive", path, train, test, _Members(path, archive).read, path)


def find_archive(path: Path) -> list[Source]:
    """The source of this form in a folder: none, or one."""
    file = path / ARCHIVES["cifar10"].file
    return [archive_source(file)] if file.is_file() else []


class _Members:
    # One pass over the archive for all of its files: going back in it means decompressing it again.
    def __init__(self, path: Path, archive: Archive) -> None:
        self._path, self._archive = path, archive
        self._contents: dict[str, bytes] = {}

    def read(self, member: Path) -> Iterator[Item]:
        if not self._contents:
            self._contents = self._read_all()
        return read_content(member, self._contents.pop(member.name))

    def _read_all(self) -> dict[str, bytes]:
        try:
            with self._path.open("rb") as file:
                check(file, self._archive)
                return {name: content for name, content in read_members(file, self._archive) if name in TRAIN + TEST}
        except WrongFileError as error:
            raise _not_it(self._path, self._archive, str(error)) from error


def _not_it(path: Path, archive: Archive, found: str) -> BadInputError:
    return BadInputError(
        f"{path}: wanted the official {archive.file} of {archive.size:,} bytes with its SHA-256, found {found}, and opened nothing; "
        f"get it whole by affdiv data cifar10 --download, or give a folder with {FORMS}"
    )
