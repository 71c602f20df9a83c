# What the lab's commands report as bad input: one clear line, exit code 2.
from __future__ import annotations


class BadInputError(ValueError):
    """Something the user gave cannot be used: the message says what was wanted, what came and the way out."""


class StudyFailedError(RuntimeError):
    """A study could not be finished for no fault of its input: exit code 1."""


def first_line(error: BaseException) -> str:
    """What a library said, cut to one line for a message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
