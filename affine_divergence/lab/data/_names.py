# The names of the data sets and how a user writes one: NAME or NAME=PATH.
from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from affine_divergence.lab.errors import BadInputError

HOW: dict[str, str] = {
    "digits": "scikit-learn's 8×8 digits, embedded: nothing to get",
    "cifar10": "CIFAR-10 without loss: affdiv data cifar10 --download, or cifar10=PATH",
    "cifar10-jpeg": "CIFAR-10 stored as lossy JPEG: cifar10-jpeg=PATH",
    "fashion-mnist": "Fashion-MNIST in IDX files: Debian's package dataset-fashion-mnist, or fashion-mnist=PATH",
}
"""The known data sets and how each is had."""

NAMES: tuple[str, ...] = tuple(HOW)
"""Their names; `cifar10-jpeg` is CIFAR-10 stored as lossy JPEG: other pixels, hence another name."""

FORMS = (
    "Hugging Face parquet files (train-*.parquet, test-*.parquet), "
    "class folders (train/CLASS/*.png, test/CLASS/*.png), the Python batches (cifar-10-batches-py) or their archive"
)


def parse_source(text: str) -> tuple[str, Path | None]:
    """The name and the path in "NAME" or "NAME=PATH"; BadInputError if the name is unknown or the path empty.

    >>> parse_source("digits")
    ('digits', None)
    >>> parse_source("cifar10=images")[1].name
    'images'
    """
    name, equals, path = text.partition("=")
    check_name(name)
    if not equals:
        return name, None
    if not path.strip():
        raise BadInputError(f"data {text!r}: a path was wanted after '=', nothing came; write {name}=PATH, or {name} alone")
    try:
        # A shell leaves the ~ of NAME=~/PATH alone.
        return name, Path(path).expanduser()
    except RuntimeError:  # ~somebody, unknown here
        return name, Path(path)


def check_name(name: str) -> None:
    if name not in NAMES:
        close = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BadInputError(f"unknown data set {name!r}: wanted one of {', '.join(NAMES)}{hint}")
