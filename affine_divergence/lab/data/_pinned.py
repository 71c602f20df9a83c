# The archives that can be downloaded: where each is, how long, and the checksums by which it is known to be whole.
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader


@dataclass(frozen=True)
class Archive:
    """A published .tar.gz: its file name, its official address, its length in bytes and SHA-256; the files to take from `folder` in it,
    with the MD5 of each.
    """

    file: str
    url: str
    size: int
    sha256: str
    folder: str
    members: Mapping[str, str]


# The SHA-256 is the one in Keras (keras/src/datasets/cifar10.py), the MD5s are torchvision's (torchvision/datasets/cifar.py), which
# knows the archive by c58f30108f718f92721af3b95e74349a; the length is what its server announces.
ARCHIVES: dict[str, Archive] = {
    "cifar10": Archive(
        file="cifar-10-python.tar.gz",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        size=170_498_071,
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        members={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
    )
}


class WrongFileError(Exception):
    """A file is not the archive: the message says what came instead."""


def check(file: BufferedReader, archive: Archive) -> None:
    """Reads a file from its start to its end and raises WrongFileError unless it is the archive; leaves it at its start."""
    file.seek(0)
    first = file.read(512)
    file.seek(0)
    check_start(first)
    hasher = hashlib.file_digest(file, "sha256")
    size = file.tell()
    file.seek(0)
    if size != archive.size:
        raise WrongFileError(f"{size:,} bytes, {archive.size:,} were wanted")
    if hasher.hexdigest() != archive.sha256:
        raise WrongFileError(f"SHA-256 {hasher.hexdigest()[:12]}…, {archive.sha256[:12]}… was wanted")


def check_start(first: bytes) -> None:
    """Raises WrongFileError unless the first bytes of a file are those of gzip; a web page is called so."""
    if first.lstrip(b"\xef\xbb\xbf \t\r\n")[:9].lower().startswith((b"<!doctype", b"<html", b"<head", b"<!--", b"<?xml")):
        raise WrongFileError("a web page (HTML)")
    if not first.startswith(b"\x1f\x8b"):
        raise WrongFileError(f"no gzip file, it begins with {first[:4].hex(' ') or 'nothing'}")
