# A study's report: its files written, its verdicts and tables shown in the terminal.
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from affine_divergence.lab.claims import Judged
from affine_divergence.lab.report import (
    CLAIM_HEADERS,
    FEW,
    HEADERS,
    TENDENCY_HEADERS,
    Report,
    claim_line,
    glances,
    headline,
    lines,
    matrix,
    tendency_line,
    write_report,
)
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_report(records: Sequence[Record], grid_text: str, out: Path, claims_text: str | None = None) -> None:
    """Write the report; the claims are those that the study kept, if any."""
    report = write_report(records, grid_text, out, claims_text)
    _print_tables(report)
    print(f"report: {report.page}")


def _print_tables(report: Report) -> None:
    from rich.console import Console

    summary = report.summary
    methods, rows = matrix(summary.settings)
    console = Console(width=None if sys.stdout.isatty() else max(140, 50 + 15 * len(methods)))
    if any(judged.protocol for judged in report.claims):
        _print_protocols(console, report)
    elif report.claims:
        table = _table(f"{summary.grid.study} on {summary.grid.data}: did the claims hold?", CLAIM_HEADERS, left=(0, 1, 2, 7))
        for judged in report.claims:
            table.add_row(*claim_line(judged).cells)
        console.print(table)
        console.print()
    if len(summary.settings) <= FEW:
        _print_settings(console, summary)
    else:
        _print_matrix(console, summary, methods, rows)
    if summary.missing:
        verdicts = " The verdicts are not final." if report.claims else ""
        console.print(f"Not finished: {summary.missing} trials of the present stage are missing.{verdicts}")


def _print_protocols(console: Console, report: Report) -> None:
    grid = report.summary.grid
    show_glances(console, f"{grid.study} on {grid.data}: which claims hold, under which protocol?", report.claims)
    table = _table("", TENDENCY_HEADERS, left=(0, 1, 2, 3, 6, 7))
    for judged in report.claims:
        table.add_row(*tendency_line(judged))
    console.print(table)
    console.print()


def show_glances(console: Console, title: str, judged: Sequence[Judged]) -> None:
    """The table of claims × protocols."""
    protocols, rows = glances(judged)
    table = _table(title, ("claim", *protocols), left=range(len(protocols) + 1))
    for claim, statement, cells in rows:
        table.add_row(f"{claim} {statement}", *("\n".join(filter(None, (c.verdict, c.cells, c.lead))) if c else "–" for c in cells))
        table.add_section()
    console.print(table)


def _print_settings(console: Console, summary: Summary) -> None:
    for setting in summary.settings:
        table = _table(f"{summary.grid.study} on {summary.grid.data}: {setting.name}", HEADERS)
        rows = lines(setting)
        for row in rows:
            table.add_row(*row.cells)
        console.print(table)
        console.print(headline(setting), highlight=False)
        for flag in (flag for row in rows for flag in row.flags):
            console.print(f"Note: {flag}.", highlight=False)
        console.print()


def _print_matrix(console: Console, summary: Summary, methods: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    title = f"{summary.grid.study} on {summary.grid.data}: test accuracy, %, ± half its 95 % interval"
    table = _table(title, ("setting", "n", *map(_in_two, methods)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("*: a learning rate, or damping, at the edge of those tried. †: runs diverged, which count as chance.", highlight=False)
    console.print()


def _in_two(method: str) -> str:
    # Cut short, the names of LayerNorm over a sample and at a position would be one.
    return method.replace("-norm-", "-norm-\n").replace("-like-", "-like-\n")


def _table(title: str, headers: Sequence[str], left: Sequence[int] = (0,)) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place in left else "right")
    return table
