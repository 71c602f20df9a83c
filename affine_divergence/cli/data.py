# affdiv data: the data sets, how each is had, and one of them downloaded, decoded and described.
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from affine_divergence.cli._kept import kept
from affine_divergence.cli._options import Cache
from affine_divergence.cli._progress import tell
from affine_divergence.lab.data import HOW, parse_source
from affine_divergence.lab.errors import BadInputError

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

_MB = 1_000_000


def data(
    source: str | None = None,
    /,
    *,
    download: Annotated[bool, Parameter(negative=(), help="Fetch what is not there yet; an interrupted download goes on.")] = False,
    to: Annotated[Path | None, Parameter(help="Folder to download to; the user's cache folder if not given.")] = None,
    mirror: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Address to try before the official one, of the file or (ending with /) its folder; may be repeated."),
    ] = None,
    cache: Cache = None,
) -> None:
    """List the data sets, or prepare one: find it, check it, decode it into the cache, and say what it is.

    Nothing but --download uses the network.

    Parameters
    ----------
    source
        NAME or NAME=PATH, as for affdiv run --data. Without it the known names are listed.
    """
    if not download and (to is not None or mirror):
        raise BadInputError(f"{'--to' if to is not None else '--mirror'} is of use with --download only; add it")
    if source is None:
        if download:
            raise BadInputError("--download wants the name of a data set: affdiv data cifar10 --download")
        _list()
        return
    name, path = parse_source(source)
    with kept() if download else nullcontext():
        if download:
            path = _download(name, path, to, mirror or [])
        _describe(name, path, cache)
    if to is not None:
        print(f"use with  --data {name}={path}")


def _list() -> None:
    for name, how in HOW.items():
        print(f"{name:<15}{how}")


def _download(name: str, path: Path | None, to: Path | None, mirrors: list[str]) -> Path:
    from affine_divergence.lab.data import ARCHIVES, download, downloads_folder

    if name not in ARCHIVES:
        raise BadInputError(f"--download fetches {', '.join(ARCHIVES)} only; {HOW[name]}")
    if path is not None:
        raise BadInputError(f"{name}={path} names a copy that is there, --download fetches one; to download to a folder write --to FOLDER")
    with _transfer(ARCHIVES[name].file) as (say, progress):
        return download(
            name, ARCHIVES[name], to.expanduser() if to is not None else downloads_folder(name), mirrors=mirrors, say=say, progress=progress
        )


def _describe(name: str, path: Path | None, cache: Path | None) -> None:
    from affine_divergence.lab.data import load, locate, split_rows

    form = locate(name, path)
    dataset = load(name, path, cache=cache)
    train, validation = (len(rows) for rows in split_rows(name, len(dataset.train_images)))
    for what, value in (
        ("name", name),
        ("form", form),
        ("images", f"{train:,} train, {validation:,} validation, {len(dataset.test_images):,} test"),
        ("shape", " × ".join(map(str, dataset.train_images.shape[1:]))),
        ("classes", dataset.classes),
        ("digest", dataset.digest),
    ):
        print(f"{what:<10}{value}")


@contextmanager
def _transfer(file: str) -> Iterator[tuple[Say, Progress]]:
    """A bar on a terminal, plain lines elsewhere, on standard error."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield tell, _tenths(file)
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.DownloadColumn(), bars.TransferSpeedColumn())
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        tasks: list[bars.TaskID] = []

        def show(have: int, size: int) -> None:
            if not tasks:
                tasks.append(bar.add_task(file, total=size))
            bar.update(tasks[0], completed=have)

        yield lambda text: bar.console.print(text, markup=False, highlight=False, soft_wrap=True), show


def _tenths(file: str) -> Progress:
    shown = -1

    def show(have: int, size: int) -> None:
        nonlocal shown
        tenth = 10 * have // size
        if tenth != shown:
            shown = tenth
            tell(f"{file}: {have / _MB:.1f} of {size / _MB:.1f} MB")

    return show
