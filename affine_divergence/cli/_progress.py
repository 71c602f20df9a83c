# Progress on standard error: a bar on a terminal, plain lines elsewhere.
from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from affine_divergence.lab.rounds import Work
from affine_divergence.lab.study import Progress

QUIET = 15.0  # seconds between two lines in which no trial was finished


@contextmanager
def progress() -> Iterator[Progress]:
    if sys.stderr is not None and sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    import rich.console
    from rich import progress as bars

    name, said = bars.TextColumn("{task.description:<10}"), bars.TextColumn("{task.fields[said]}")
    with bars.Progress(name, bars.BarColumn(), said, bars.TimeElapsedColumn(), console=rich.console.Console(stderr=True)) as bar:
        tasks: list[bars.TaskID] = []

        def show(stage: str, finished: int, total: int, work: Work | None) -> None:
            share = work.share if work else finished / total
            if not share:  # a new round
                tasks.append(bar.add_task(stage, total=1.0, said=""))
            bar.update(tasks[-1], completed=share, said=_said(stage, finished, total, work))

        yield show


def tell(message: str) -> None:
    """A line on standard error; a study goes on where nobody can read it."""
    try:
        if sys.stderr is not None:
            print(message, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (what is left unwritten would make the exit code 120)


def _lines() -> Progress:
    start = time.monotonic()
    last, before = start, -1

    def show(stage: str, finished: int, total: int, work: Work | None) -> None:
        nonlocal last, before
        now = time.monotonic()
        if not (work and work.share) or finished != before or now - last >= QUIET:
            last, before = now, finished
            tell(f"{stage}: {_said(stage, finished, total, work)}, {now - start:.0f} s")

    return show


def _said(stage: str, finished: int, total: int, work: Work | None) -> str:
    if stage == "timing":
        return f"{finished} of {total} shapes"
    parts = [f"{finished} of {total} trials"]
    if work is not None and finished < total and work.share:
        parts.append(f"{100 * work.share:.0f} % of their work")
    if work is not None and work.left is not None and work.left >= 1.0:
        parts.append(f"about {duration(work.left)} left of the study")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """A duration in its largest fitting unit.

    >>> [duration(seconds) for seconds in (42.4, 200, 3600, 9000)]
    ['42 s', '3 min', '60 min', '2.5 h']
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"
