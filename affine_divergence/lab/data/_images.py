# One encoded image to pixels: PNG or JPEG, 32 × 32, RGB, and nothing else.
from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from affine_divergence.lab.errors import BadInputError, first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE = 32


def encoding(image: bytes | NDArray[np.uint8], place: str) -> str:
    """"PNG", "JPEG" or "raw": told by the first bytes, never by the file's name."""
    if isinstance(image, np.ndarray):
        return "raw"
    if image.startswith(b"\xff\xd8"):
        return "JPEG"
    if image.startswith(b"\x89PNG"):
        return "PNG"
    raise BadInputError(f"{place}: wanted a PNG or JPEG image, found bytes that begin with {image[:4].hex(' ') or 'nothing'}")


def decode(image: bytes | NDArray[np.uint8], place: str) -> NDArray[np.uint8]:
    """The pixels (3, 32, 32)."""
    if isinstance(image, np.ndarray):
        return image
    from PIL import Image

    try:
        with Image.open(io.BytesIO(image), formats=("PNG", "JPEG")) as picture:
            size, mode = picture.size, picture.mode
            if size == (_SIDE, _SIDE) and mode == "RGB":
                return np.asarray(picture).transpose(2, 0, 1)
    except Exception as error:  # on damaged files Pillow raises OSError, SyntaxError, struct.error, zlib.error and more
        raise BadInputError(f"{place}: an image that cannot be decoded ({first_line(error)}); replace it") from error
    raise BadInputError(f"{place}: wanted an image of 32×32 RGB, found {size[0]}×{size[1]} {mode}; is it CIFAR-10?")
