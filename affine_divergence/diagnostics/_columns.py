# A table in columns of text; one that is wider than a terminal in blocks, one below the other.
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from affine_divergence.diagnostics._tables import Table, cut

_LONGEST_NAME, _LONGEST = 22, 32  # letters of the first cell of a row, and of any other
_GAP = 2


def lines(table: Table, width: float = math.inf) -> list[str]:
    """Columns as wide as they need be, words to the left, numbers to the right; each block begins with the columns that name the rows."""
    columns = [
        [header, *cut(cells, _LONGEST if place else _LONGEST_NAME)]
        for place, (header, *cells) in enumerate(zip(table.headers, *table.rows, strict=True))
    ]
    blocks = _blocks(table, [max(map(len, column)) for column in columns], width)
    return [line for i, widths in enumerate(blocks) for line in (*([""] if i else []), *_block(table, columns, widths))]


def _blocks(table: Table, widths: Sequence[int], width: float) -> Iterator[dict[int, int]]:
    """By column that is in the block, how wide it is there. What stands under one title stays together where it can."""
    keys = list(range(table.keys))
    block = keys
    for part in _parts(table, widths, width):
        if len(block) > len(keys) and _total(_fitted(table, widths, [*block, *part])) > width:
            yield _fitted(table, widths, block)
            block = keys
        block = [*block, *part]
    yield _fitted(table, widths, block)


def _parts(table: Table, widths: Sequence[int], width: float) -> Iterator[list[int]]:
    keys = list(range(table.keys))
    for title, own in _grouped(table, range(len(widths))):
        part = [place for place in own if place not in keys]
        if title and _total(_fitted(table, widths, [*keys, *part])) <= width:
            yield part
        else:
            yield from ([place] for place in part)


def _grouped(table: Table, places: Sequence[int]) -> list[tuple[str, list[int]]]:
    """The titles over these columns, with those that stand under each."""
    ends = list(itertools.accumulate(count for _, count in table.groups))
    by_group = itertools.groupby(places, lambda place: next((i for i, end in enumerate(ends) if place < end), -1))
    return [(table.groups[group][0] if table.groups else "", list(own)) for group, own in by_group]


def _fitted(table: Table, widths: Sequence[int], places: Sequence[int]) -> dict[int, int]:
    found = {place: widths[place] for place in places}
    for title, own in _grouped(table, places):
        if title:  # a title over a few narrow columns has room all the same
            found[own[-1]] += max(0, len(title) + 2 - _total({place: found[place] for place in own}))
    return found


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _block(table: Table, columns: Sequence[Sequence[str]], widths: dict[int, int]) -> list[str]:
    cells = [
        [cell.ljust(width) if columns[place][0] in table.left else cell.rjust(width) for cell in columns[place]]
        for place, width in widths.items()
    ]
    header, *rows = [
        (" " * _GAP).join(line).rstrip()
        for i, line in enumerate(zip(*cells, strict=True))
        if not i or any(columns[place][i] for place in widths if place >= table.keys)  # a twin may have nothing in these columns
    ]
    return [*_titles(table, widths), header, "─" * max(map(len, (header, *rows))), *rows]


def _titles(table: Table, widths: dict[int, int]) -> list[str]:
    cells = []
    for title, own in _grouped(table, list(widths)):
        total = _total({place: widths[place] for place in own})
        cells.append(f" {title} ".center(total, "─") if title else " " * total)
    line = (" " * _GAP).join(cells).rstrip()
    return [line] if line else []
