# What is said where a package of the extra `diagnosis` is missing.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Around the imports of what the core does without: what it was for, and how to have it."""
    try:
        yield
    except ModuleNotFoundError as error:
        way_out = "install it with pip install 'affine-divergence[diagnosis]'"
        raise ImportError(f"{what} needs {error.name}, which is not installed; {way_out}", name=error.name) from error
