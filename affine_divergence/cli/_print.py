# A study's report: its files written, its tables shown in the terminal.
from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from affine_divergence.lab.report import HEADERS, headline, lines, write_report
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import Summary


def show_report(records: Sequence[Record], grid_text: str, out: Path) -> None:
    page, summary = write_report(records, grid_text, out)
    _print_tables(summary)
    print(f"report: {page}")


def _print_tables(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for setting in summary.settings:
        table = Table(title=f"{summary.grid.study} on {summary.grid.data}: {setting.name}", title_justify="left")
        for place, header in enumerate(HEADERS):
            table.add_column(header, justify="left" if place == 0 else "right")
        rows = lines(setting)
        for row in rows:
            table.add_row(*row.cells)
        console.print(table)
        console.print(headline(setting), highlight=False)
        for flag in (flag for row in rows for flag in row.flags):
            console.print(f"Note: {flag}.", highlight=False)
        console.print()
    if summary.missing:
        console.print(f"Not finished: {summary.missing} trials of the present stage are missing.")
