# A checked archive's members: read one by one, written into a folder that appears whole or not at all.
from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import uuid
import zlib
from typing import TYPE_CHECKING

from affine_divergence.lab.errors import first_line

from ._pinned import WrongFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from pathlib import Path

    from ._pinned import Archive


def read_members(file: BufferedReader, archive: Archive) -> Iterator[tuple[str, bytes]]:
    """Name and content of every expected member. Whatever else is in the archive is passed over, links and odd paths too: nothing but
    the bytes of regular files with the expected names and checksums leaves it.
    """
    left = {f"{archive.folder}/{name}": name for name in archive.members}
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as tar:
            for info in tar:
                name = left.get(info.name)
                stream = tar.extractfile(info) if name is not None and info.isreg() else None
                if name is None or stream is None:
                    continue
                content = stream.read()
                if _md5(content) != archive.members[name]:
                    raise WrongFileError(f"an archive whose {name} has another checksum")
                del left[info.name]
                yield name, content
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise WrongFileError(f"a damaged archive ({first_line(error)})") from error
    if left:
        raise WrongFileError(f"an archive without {', '.join(left.values())}")


def unpack(file: BufferedReader, archive: Archive, place: Path) -> Path:
    """Writes the members into the archive's folder in `place`, which must not be there yet, and returns it."""
    temporary = place / f"{_prefix(archive)}{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        for name, content in read_members(file, archive):
            (temporary / name).write_bytes(content)
        os.replace(temporary, place / archive.folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place / archive.folder


def is_unpacked(place: Path, archive: Archive) -> bool:
    """Whether the archive's folder in `place` holds every member whole."""
    for name, md5 in archive.members.items():
        path = place / archive.folder / name
        if not path.is_file() or _md5(path.read_bytes()) != md5:
            return False
    return True


def sweep(place: Path, archive: Archive) -> None:
    """Removes what an unpacking left that was killed; only for one that has the lock."""
    for left in place.glob(f"{_prefix(archive)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(archive: Archive) -> str:
    return f".{archive.folder}.unpacking-"


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
