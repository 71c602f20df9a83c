# A diagnosis as plain text: what print shows.
from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from affine_divergence.diagnostics._columns import lines
from affine_divergence.diagnostics._records import Diagnosis
from affine_divergence.diagnostics._sentences import (
    BENIGN,
    CORRECTIONS,
    GLOSSARY,
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
from affine_divergence.diagnostics._tables import calls_table, corrections_table, rows_table
from affine_divergence.diagnostics._verdict import RULES
from affine_divergence.diagnostics._visible import shown

MOST = 40  # calls that are shown
WIDTH = 140  # of a paragraph where there is no terminal


def text(diagnosis: Diagnosis, width: int | None = None) -> str:
    """Coverage, the calls worst first with the reasons of their verdicts, loss, self-check, corrections, what was assumed, what it means.

    width: columns that no line should exceed; None: tables as wide as they are.
    """
    diagnosis = shown(diagnosis)
    blocks = (
        [f"Diagnosis of step {diagnosis.step}", *_wrapped(coverage_lines(diagnosis), width)],
        list(_calls(diagnosis, width)),
        _wrapped([line for line in (loss_line(diagnosis), *check_lines(diagnosis)) if line], width),
        list(_corrections(diagnosis, width)),
        _wrapped(["; ".join(f"{name}: {value}" for name, value in about_items(diagnosis)), SCOPE], width),
        _wrapped([GOOD, RULES, BENIGN], width),
        _wrapped(_meanings(), width) if diagnosis.rows else [],
    )
    return "\n\n".join("\n".join(block) for block in blocks if block)


def terminal_width() -> int | None:
    """Columns of the terminal that the standard output is; None where it is none."""
    is_terminal = getattr(sys.stdout, "isatty", None)
    return shutil.get_terminal_size().columns if is_terminal is not None and is_terminal() else None


def _calls(diagnosis: Diagnosis, width: int | None) -> Iterator[str]:
    yield headline(diagnosis)
    if not diagnosis.rows:
        return
    yield ""
    yield from lines(rows_table(diagnosis, MOST), width or math.inf)
    if len(diagnosis.rows) > MOST:
        yield f"The {MOST} worst of {len(diagnosis.rows)} calls; .to_frame() has all."
    yield from _wrapped(notes(diagnosis), width)
    said = reasons(diagnosis.worst()[:MOST])
    if said:
        yield ""
        yield from _wrapped([f"{verdict}: {names}: {reason}" for verdict, names, reason in said], width)


def _corrections(diagnosis: Diagnosis, width: int | None) -> Iterator[str]:
    corrections, calls = corrections_table(diagnosis), calls_table(diagnosis, MOST)
    if corrections is None:
        return
    yield "What a step would do to these rows under a correction:"
    yield from lines(corrections, width or math.inf)
    if calls is not None:
        yield ""
        yield from lines(calls, width or math.inf)
        if len(diagnosis.rows) > MOST:
            yield f'The {MOST} worst of {len(diagnosis.rows)} calls; .to_frame("counterfactual") has all.'
    yield from _wrapped([*refusals(diagnosis), CORRECTIONS], width)


def _meanings() -> list[str]:
    told = (f"  {name}: {meaning}{f'; ideal: {ideal}' if ideal else ''}." for name, meaning, ideal in GLOSSARY)
    return ["What the columns say:", *told]


def _wrapped(paragraphs: Iterable[str], width: int | None) -> list[str]:
    found = []
    for paragraph in paragraphs:
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        found += textwrap.wrap(paragraph, width or WIDTH, subsequent_indent=indent + "  ", break_long_words=False, break_on_hyphens=False)
    return found
