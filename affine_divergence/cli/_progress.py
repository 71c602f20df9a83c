# Progress on standard error: a bar on a terminal, plain lines elsewhere.
from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from affine_divergence.lab.study import Progress


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

    columns = (bars.TextColumn("{task.description:<10}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        tasks: list[bars.TaskID] = []

        def show(stage: str, finished: int, total: int) -> None:
            if finished == 0:
                tasks.append(bar.add_task(stage, total=total))
            bar.update(tasks[-1], completed=finished)

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

    def show(stage: str, finished: int, total: int) -> None:
        what = "shapes" if stage == "timing" else "trials"
        tell(f"{stage}: {finished} of {total} {what}, {time.monotonic() - start:.0f} s")

    return show
