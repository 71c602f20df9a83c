# A diagnosis as plain text: what print shows.
from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from affine_divergence.diagnostics._records import Diagnosis
from affine_divergence.diagnostics._sentences import (
    BENIGN,
    GOOD,
    SCOPE,
    about_items,
    check_lines,
    coverage_lines,
    headline,
    loss_line,
    notes,
    reasons,
    refusals,
)
from affine_divergence.diagnostics._tables import Table, calls_table, corrections_table, rows_table
from affine_divergence.diagnostics._verdict import RULES
from affine_divergence.diagnostics._visible import shown

MOST = 40  # calls that are shown
WIDTH = 140
_LONGEST_NAME, _LONGEST = 22, 32  # letters of the first cell of a row, and of any other


def text(diagnosis: Diagnosis) -> str:
    """Coverage, the calls worst first with the reasons of their verdicts, loss, self-check, corrections, what was assumed."""
    diagnosis = shown(diagnosis)
    blocks = (
        [f"Diagnosis of step {diagnosis.step}", *_wrapped(coverage_lines(diagnosis))],
        list(_calls(diagnosis)),
        _wrapped([line for line in (loss_line(diagnosis), *check_lines(diagnosis)) if line]),
        list(_corrections(diagnosis)),
        _wrapped(["; ".join(f"{name}: {value}" for name, value in about_items(diagnosis)), SCOPE]),
        _wrapped([GOOD, RULES, BENIGN]),
    )
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _calls(diagnosis: Diagnosis) -> Iterator[str]:
    yield headline(diagnosis)
    if not diagnosis.rows:
        return
    yield ""
    yield from lines(rows_table(diagnosis, MOST))
    if len(diagnosis.rows) > MOST:
        yield f"The {MOST} worst of {len(diagnosis.rows)} calls; .to_frame() has all."
    yield from _wrapped(notes(diagnosis))
    said = reasons(diagnosis.worst()[:MOST])
    if said:
        yield ""
        yield from _wrapped([f"{verdict}: {names}: {reason}" for verdict, names, reason in said])


def _corrections(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.counterfactual and not diagnosis.steps:
        return
    yield "What a step would do to these rows under a correction:"
    yield from lines(corrections_table(diagnosis))
    table = calls_table(diagnosis, MOST)
    if table:
        yield ""
        yield from lines(table)
    yield from _wrapped(refusals(diagnosis))


def lines(table: Table) -> list[str]:
    """The table in columns that are as wide as they need be: words to the left, numbers to the right."""
    rows = [(_short(row[0], _LONGEST_NAME), *(_short(cell, _LONGEST) for cell in row[1:])) for row in table.rows]
    columns = [[header, *cells] for header, *cells in zip(table.headers, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    shown = [
        [cell.ljust(width) if column[0] in table.left else cell.rjust(width) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    ]
    found = ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]
    rule = "─" * max(map(len, found))
    return [*_over(table.groups, widths), found[0], rule, *found[1:]]


def _over(groups: Sequence[tuple[str, int]], widths: Sequence[int]) -> list[str]:
    if not any(title for title, _ in groups):
        return []
    rest = iter(widths)
    cells = []
    for title, count in groups:
        own = list(itertools.islice(rest, count))
        width = sum(own) + 2 * (count - 1)
        cells.append(f" {title} ".center(width, "─")[:width] if title else " " * width)
    return ["  ".join(cells).rstrip()]


def _short(cell: str, longest: int) -> str:
    # The end of a module's name tells more than its beginning.
    return cell if len(cell) <= longest else f"…{cell[1 - longest :]}"


def _wrapped(paragraphs: Iterable[str]) -> list[str]:
    found = []
    for paragraph in paragraphs:
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        found += textwrap.wrap(paragraph, WIDTH, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False)
    return found
