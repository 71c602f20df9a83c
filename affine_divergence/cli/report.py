# affdiv report: the page, figures and table of a study, from its store or from its Parquet file.
from __future__ import annotations

from pathlib import Path

from affine_divergence.cli._options import Out
from affine_divergence.cli._print import show_report
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.store import Record, read


def report(source: Path, /, *, out: Out = Path("report")) -> None:
    """Make a study's report from its results.

    Parameters
    ----------
    source
        Store folder of affdiv run, or a trials.parquet.
    """
    text, records, claims = load(source)
    show_report(records, text, out, claims)


def load(source: Path) -> tuple[str, list[Record], str | None]:
    """The grid file's text, the records and the claims' text of a store, or of a trials.parquet."""
    if source.is_file():
        return from_frame(read_parquet(source))
    if not source.exists():
        raise BadInputError(f"there is no {source}; give the folder of a store, or a trials.parquet")
    with read(source) as store:
        text = store.get("grid")
        if text is None:
            raise BadInputError(f"the store {source} is empty; run a study into it first")
        return text, store.records(), store.get("claims")
