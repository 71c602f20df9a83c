# Where only what is made there listens: a diagnosis under a monitor is no step of the training that the monitor follows.
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Suspended(threading.local):
    depth = 0


_SUSPENDED = _Suspended()


def depth() -> int:
    """How often this thread is in such a place; a capture listens where it was made."""
    return _SUSPENDED.depth


def is_suspended() -> bool:
    """Whether only captures made in here listen."""
    return _SUSPENDED.depth > 0


@contextmanager
def suspended() -> Iterator[None]:
    """No capture listens in here but those made in here: `diagnose` is no step of a training that a monitor follows."""
    _SUSPENDED.depth += 1
    try:
        yield
    finally:
        _SUSPENDED.depth -= 1
