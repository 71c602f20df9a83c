# One IDX file (the format of MNIST) to an array of bytes: exactly what its header says, or one clear message.
from __future__ import annotations

import gzip
import struct
import zlib
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from affine_divergence.lab.errors import BadInputError, first_line

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# The third byte of an IDX file; this is the one of unsigned bytes.
_UINT8 = 0x08
_TYPES = {0x08: "uint8", 0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array in a file, which must be of this shape; gzip is told by the file's first bytes, not by its name."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            # A gzip file's own checksum is compared when its end is read.
            return _read(gzip.GzipFile(fileobj=raw) if packed else raw, path, shape)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInputError(f"{path}: not a whole gzip file ({first_line(error)}); use a whole copy") from error


def _read(file: BinaryIO | gzip.GzipFile, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0":
        raise BadInputError(f"{path}: wanted an IDX file, which begins with 00 00, found {start.hex(' ') or 'an empty file'}")
    if start[2] != _UINT8:
        kind = _TYPES.get(start[2], f"the type {start[2]:02x}")
        raise BadInputError(f"{path}: wanted an IDX file of uint8, found {kind}; use the original files")
    if start[3] != len(shape):
        raise BadInputError(f"{path}: wanted {len(shape)} dimensions, found {start[3]}; are images and labels exchanged?")
    sizes = file.read(4 * len(shape))
    if len(sizes) < 4 * len(shape):
        raise BadInputError(f"{path}: it ends within its header; use a whole copy")
    found = struct.unpack(f">{len(shape)}I", sizes)
    # Before anything of that size is asked for: a header can claim anything.
    if found != shape:
        raise BadInputError(f"{path}: wanted {_text(shape)}, its header says {_text(found)}; is it the right file?")
    wanted = int(np.prod(shape))
    content = file.read(wanted)
    if len(content) < wanted:
        raise BadInputError(f"{path}: truncated, wanted {wanted:,} bytes after the header, found {len(content):,}; use a whole copy")
    if file.read(1):
        raise BadInputError(f"{path}: more than the {wanted:,} bytes that its header announces; use the original file")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))
