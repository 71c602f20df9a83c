# What stops the measures of one layer is that layer's reason in the coverage, and no other's: what was foreseen, and faults.
from __future__ import annotations


class NotMeasuredError(Exception):
    """Why a layer is not measured, as the coverage says it."""


def reason_of(error: Exception) -> str:
    """What the coverage says of the layer whose measures raised this."""
    return str(error) if isinstance(error, NotMeasuredError) else unforeseen(error)


def unforeseen(error: Exception) -> str:
    """Of a fault. All come by here: tests have them raised."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"measuring it failed: {type(error).__name__}{': ' if said else ''}{said}"
