# One address, one try: bytes over HTTP into a partial file, from where it ends if the server can do that.
from __future__ import annotations

import re
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import affine_divergence
from affine_divergence.lab.errors import first_line

from ._pinned import WrongFileError, check_start

if TYPE_CHECKING:
    from ._partial import PartialFile
    from ._pinned import Archive

Progress = Callable[[int, int], None]
"""Called with the number of bytes that are there, and of all."""

_CHUNK = 1 << 16


class TransferError(Exception):
    """An address did not give the file: the message says why."""


def fetch(url: str, part: PartialFile, archive: Archive, progress: Progress, timeout: float) -> None:
    """Brings a part to the archive's length. TransferError says why it could not; what came until then stays.

    The timeout is that of connecting and of every wait for more bytes, not of the whole.
    """
    have = part.size()
    if have > archive.size:
        part.drop()
    elif have == archive.size:
        return
    with _ask(url, part, timeout) as response:
        # A server that cannot resume, or whose file is another by now (If-Range), answers 200 with all of it.
        chunk = _continue(response, part, archive) if response.status == 206 else _start(url, response, part, archive)
        while chunk:
            if part.size() + len(chunk) > archive.size:
                part.drop()
                raise TransferError(f"it sends more than {archive.size:,} bytes: another file")
            part.append(chunk)
            progress(part.size(), archive.size)
            chunk = _read(response)
    if part.size() < archive.size:
        raise TransferError(f"the connection ended after {part.size():,} of {archive.size:,} bytes")


def _ask(url: str, part: PartialFile, timeout: float) -> HTTPResponse:
    # Bytes as they are stored: a length and a range of a compressed transfer would be those of something else.
    headers = {"User-Agent": f"affine-divergence/{affine_divergence.__version__}", "Accept-Encoding": "identity"}
    have, version = part.size(), part.version(url)
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=timeout)
        return response
    except HTTPError as error:
        with error:
            if error.code == 416 and have:  # the part is no beginning of what is there
                part.drop()
                return _ask(url, part, timeout)
            raise TransferError(f"HTTP {error.code} {error.reason}") from error
    except URLError as error:
        raise TransferError(_reason(error.reason)) from error
    except (OSError, HTTPException, ValueError) as error:
        raise TransferError(_reason(error)) from error


def _continue(response: HTTPResponse, part: PartialFile, archive: Archive) -> bytes:
    came = response.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", came.strip())
    if found is None or int(found[1]) != part.size() or found[2] not in ("*", str(archive.size)):
        part.drop()
        raise TransferError(f"it goes on with the range {came!r}, which is not the rest of the archive; the partial file was deleted")
    return _read(response)


def _start(url: str, response: HTTPResponse, part: PartialFile, archive: Archive) -> bytes:
    # Looked at before anything is written: a login page must not cost the user what is there already.
    chunk = _read(response)
    try:
        check_start(chunk)
    except WrongFileError as error:
        raise TransferError(f"it answers with {error}, not the archive") from error
    length = response.headers.get("Content-Length")
    if length is not None and length.strip() != str(archive.size):
        raise TransferError(f"it has a file of {length} bytes, {archive.size} were wanted")
    part.begin(url, _version(response))
    return chunk


def _version(response: HTTPResponse) -> str | None:
    etag = response.headers.get("ETag")
    # A weak ETag says nothing about single bytes, and is not allowed in If-Range.
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise TransferError(_reason(error)) from error


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error) if isinstance(error, BaseException) else str(error)
