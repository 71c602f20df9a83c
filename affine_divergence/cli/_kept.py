# What an interruption says of a command that keeps what it has finished; of the others the same command starts anew.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept() -> Iterator[None]:
    """In here every part that is finished is stored, and found by the same command."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note("the same command goes on from there")
        raise
