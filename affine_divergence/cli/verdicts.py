# affdiv verdicts: the claims of several studies in one table, a column for each protocol.
from __future__ import annotations

import sys
from pathlib import Path

from affine_divergence.cli._print import show_glances
from affine_divergence.cli._progress import tell
from affine_divergence.cli.report import load
from affine_divergence.lab.claims import Judged, judge, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.grid import grid_of
from affine_divergence.lab.summary import summarise


def verdicts(*sources: Path, markdown: bool = False) -> None:
    """Show which claims hold under which protocol, over several studies.

    Each study is judged by the claims that it keeps. Where two studies judge a claim under one protocol, the later one given is shown.

    Parameters
    ----------
    sources
        Store folders of affdiv run, or trials.parquet files.
    markdown
        Print a Markdown table.
    """
    if not sources:
        raise BadInputError("name at least one store folder or trials.parquet")
    judged = [one for source in sources for one in _judged(source)]
    if not judged:
        raise BadInputError("none of these studies has claims; name studies whose grid file does")
    if markdown:
        from affine_divergence.lab.report import markdown_table

        print("\n".join(markdown_table(judged)))
        return
    from rich.console import Console

    show_glances(Console(width=None if sys.stdout.isatty() else 180), "Which claims hold, under which protocol?", judged)


def _judged(source: Path) -> tuple[Judged, ...]:
    text, records, claims = load(source)
    grid = grid_of(text, f"the grid in {source}", (record.trial for record in records))
    if claims is None or not grid.claims:
        tell(f"{source} is left out: its grid file names no claims")
        return ()
    return judge(parse_claims(claims, f"the claims in {source}"), summarise(grid, records))
