# A published archive onto this disk: one downloader at a time, mirrors in order, checked before it is opened, never half there.
from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from affine_divergence.lab.errors import BadInputError, StudyFailedError

from ._partial import PartialFile
from ._pinned import Archive, WrongFileError, check
from ._tarball import is_unpacked, sweep, unpack
from ._transfer import Progress, TransferError, fetch

if TYPE_CHECKING:
    from pathlib import Path

Say = Callable[[str], None]
"""Called with a line for the user."""

_TRIES = 20  # of one address, each of which brought something


class DownloadFailedError(StudyFailedError):
    """An archive could not be had, for no fault of the user's input."""


def download(
    name: str, archive: Archive, place: Path, *, mirrors: Sequence[str] = (), say: Say, progress: Progress, timeout: float = 30.0
) -> Path:
    """Brings the archive and its unpacked folder into `place`, as far as they are not there, and returns the folder.

    What is there is believed by its checksums only. Mirrors are tried first, in order, then the official address.
    Raises BadInputError for a mirror that is no address and a place that cannot be written to, DownloadFailedError for everything else.
    """
    urls = [_address(url, archive) for url in mirrors] + [archive.url]
    try:
        if is_unpacked(place, archive):
            say(f"{place / archive.folder} is there and whole: nothing to download")
            return place / archive.folder
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place, archive, say):
            if is_unpacked(place, archive):  # by another process, while this one waited
                say(f"{place / archive.folder} is there and whole now")
                return place / archive.folder
            sweep(place, archive)
            whole = place / archive.file
            if not _is_whole(whole, archive, say):
                _fetch_whole(name, archive, urls, whole, say, progress, timeout)
            return _unpacked(whole, archive, say)
    except OSError as error:
        raise _disk_error(error, archive, place) from error


def part_of(place: Path, archive: Archive) -> PartialFile:
    """The partial download of an archive in a folder, which may be empty."""
    return PartialFile(place / f"{archive.file}.part")


@contextmanager
def _locked(place: Path, archive: Archive, say: Say) -> Iterator[None]:
    # The file stays: removing it would let a third process lock another file of the same name.
    with (place / f".{archive.file}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is downloading to {place}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(whole: Path, archive: Archive, say: Say) -> bool:
    if not whole.exists():
        return False
    try:
        with whole.open("rb") as file:
            check(file, archive)
    except WrongFileError as error:
        aside = whole.with_name(f"{whole.name}.bad")
        os.replace(whole, aside)
        say(f"{whole} is not the official archive ({error}): it is called {aside.name} now, and downloaded anew")
        return False
    say(f"{whole} is there and whole: nothing to download")
    return True


def _fetch_whole(
    name: str, archive: Archive, urls: Sequence[str], whole: Path, say: Say, progress: Progress, timeout: float
) -> None:
    part = part_of(whole.parent, archive)
    failures = []
    for url in urls:
        try:
            _fetch_from(url, part, archive, say, progress, timeout)
        except TransferError as error:
            failures.append(f"{url}: {error}")
            if len(failures) < len(urls):
                say(f"{url}: {error}; trying the next address")
            continue
        with part.path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part.path, whole)
        part.drop()
        return
    kept = f"{part.size():,} of {archive.size:,} bytes are kept, the same command goes on from there; " if part.size() else ""
    raise DownloadFailedError(
        f"{archive.file} could not be downloaded ({'; '.join(failures)}); {kept}try again later or with --mirror URL, "
        f"or bring the archive or the unpacked {archive.folder} by hand: put it into {whole.parent}, or write --data {name}=PATH"
    )


def _fetch_from(url: str, part: PartialFile, archive: Archive, say: Say, progress: Progress, timeout: float) -> None:
    over = False
    joined = part.size() > 0  # of what several connections brought, perhaps from two different files
    for _ in range(_TRIES):
        have = part.size()
        say(f"trying {url}" + (f", from byte {have:,} of {archive.size:,} on" if have else ""))
        try:
            fetch(url, part, archive, progress, timeout)
        except TransferError as error:
            if part.size() <= have:
                raise
            say(f"{url}: {error}; trying again")
            joined = True
            continue
        try:
            with part.path.open("rb") as file:
                check(file, archive)
            return
        except WrongFileError as error:
            part.drop()
            if over or not joined:
                raise TransferError(f"what came is not the archive ({error}); it was deleted, the next try starts afresh") from error
            say(f"{url}: what was put together is not the archive ({error}); it was deleted, starting over")
            over, joined = True, False
    raise TransferError(f"the connection broke {_TRIES} times")


def _unpacked(whole: Path, archive: Archive, say: Say) -> Path:
    folder = whole.parent / archive.folder
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.bad-{uuid.uuid4().hex[:8]}")
        os.replace(folder, aside)
        say(f"{folder} was not whole: it is called {aside.name} now")
    try:
        with whole.open("rb") as file:
            return unpack(file, archive, whole.parent)
    except WrongFileError as error:
        raise DownloadFailedError(f"{whole} has its checksum, but is {error}: please report this") from error


def _address(url: str, archive: Archive) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable() and " " not in url
    except ValueError:
        good = False
    if not good:
        raise BadInputError(f"--mirror {url!r}: wanted http://… or https://…, the address of {archive.file} or (ending with /) its folder")
    return url + archive.file if url.endswith("/") else url


def _disk_error(error: OSError, archive: Archive, place: Path) -> Exception:
    where = error.filename or place
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        part = part_of(place, archive).size()
        kept = f"{part:,} of {archive.size:,} bytes" if part else "what is finished"
        return DownloadFailedError(
            f"the disk is full at {place} ({error.strerror}); {kept} of {archive.file} stays: "
            "free some space, the same command goes on from there"
        )
    return BadInputError(f"cannot use {where}: {error.strerror or error}; name a folder that can be written to with --to FOLDER")
