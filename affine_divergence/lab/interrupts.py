# Ctrl-C and SIGTERM as one exception, kept waiting where something must not be cut in two.
from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_shelters = 0
_pending: int | None = None
_heard = False


class Interrupted(KeyboardInterrupt):
    """The user or the system asked this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[None]:
    """Both signals raise `Interrupted` in the main thread; one that was ignored before, as under nohup, stays ignored."""
    global _heard
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard = False
    before = {number: signal.getsignal(number) for number in SIGNALS}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, _handle)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


@contextmanager
def sheltered() -> Iterator[None]:
    """An interruption in this block, of the main thread, is raised at its end."""
    global _shelters, _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shelters += 1
    try:
        yield
    finally:
        _shelters -= 1
        if _shelters == 0 and _pending is not None:
            number, _pending = _pending, None
            raise Interrupted(number)


@contextmanager
def blocked() -> Iterator[None]:
    """Threads started in this block, and the processes they start, do not receive the signals: they are for the main thread."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def heard() -> bool:
    """Whether the process was asked to end since it is stoppable: from then on nothing may take long."""
    return _heard


def _handle(number: int, _frame: FrameType | None) -> None:
    global _pending, _heard
    _heard = True
    if _shelters:
        _pending = number
    else:
        raise Interrupted(number)
