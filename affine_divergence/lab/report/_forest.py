# The figure of a claim: every comparison with its interval, unit by unit.
from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from affine_divergence.lab.claims import Comparison, Judged, Part, Unit
from affine_divergence.lab.report._claims import per_of
from affine_divergence.lab.report._style import COLOURS, STYLE, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.2  # inches


@dataclass(frozen=True)
class Block:
    """Comparisons under one title: those of a unit, or of all units of a part that claims nothing."""

    title: str
    part: Part
    panel: Hashable  # blocks of one panel share their axis
    per: str  # what points are counted per
    filled: bool
    rows: tuple[tuple[str, Comparison], ...]


def claim_figure(judged: Judged) -> str | None:
    """Differences in points with their 95 % intervals; filled where the unit decides, the margin grey. None without any."""
    units = [unit for unit in judged.units if any(one.evidence for one in unit.comparisons)]
    if not units:
        return None
    import matplotlib.pyplot as plt

    blocks = list(_blocks(units))
    panels = [[block for block in blocks if block.panel == panel] for panel in dict.fromkeys(block.panel for block in blocks)]
    heights = [sum(1 + len(block.rows) for block in panel) for panel in panels]
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(panels),
            1,
            figsize=(9.4, ROW * sum(heights) + 0.7 * len(panels)),
            height_ratios=heights,
            layout="constrained",
            squeeze=False,
        )
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _panel(axes, panel)
        return svg(figure)


def _blocks(units: Sequence[Unit]) -> Iterator[Block]:
    methods = {unit.part.method for unit in units}
    for _, grouped in itertools.groupby(units, key=lambda unit: id(unit.part)):
        group = list(grouped)
        part, per = group[0].part, per_of(group[0].part)
        # What is shown beside a parity has an axis of its own: a rival far off would squeeze the others.
        panel = (per, part.verdict or part.estimand != "parity", part.claims_nothing)
        if part.claims_nothing:
            labels, common = _apart([unit.line.name for unit in group])
            against = f" against {part.rivals[0]}" if len(part.rivals) == 1 else ""
            rows = [
                (label if against else f"{one.against}, {label}", one)
                for label, unit in zip(labels, group, strict=True)
                for one in unit.comparisons
            ]
            yield Block(f"{part.method}{against}, {common}: decides nothing", part, panel, per, False, tuple(rows))
            continue
        for unit in group:
            whose = f"{part.method}, " if len(methods) > 1 else ""
            title = f"{whose}{unit.line.name}: {unit.standing or unit.verdict or 'decides nothing'}"
            yield Block(title, part, panel, per, unit.verdict is not None, tuple((one.against, one) for one in unit.comparisons))


def _apart(names: Sequence[str]) -> tuple[list[str], str]:
    """What tells the names apart, and the end that they share."""
    words = [name.split(", ") for name in names]
    shared = 0
    while shared < min(map(len, words)) - 1 and len({tuple(one[-shared - 1 :]) for one in words}) == 1:
        shared += 1
    return [", ".join(one[: len(one) - shared]) for one in words], ", ".join(words[0][len(words[0]) - shared :])


def _panel(axes: Axes, blocks: Sequence[Block]) -> None:
    places, labels, y = [], [], 0.0
    for block in blocks:
        margin = block.part.margin
        axes.text(0.005, y, block.title, fontsize=9, fontweight="bold", va="center", transform=axes.get_yaxis_transform())
        if block.part.estimand == "parity":
            axes.fill_betweenx([y + 0.5, y + len(block.rows) + 0.5], -margin, margin, color="#e3e3e3", linewidth=0)
        for label, one in block.rows:
            y += 1.0
            places.append(y)
            labels.append(label)
            if one.evidence:
                interval, colour = one.evidence.interval, COLOURS.get(one.against, "#0072B2")
                axes.plot([interval.low, interval.high], [y, y], color=colour, linewidth=1.6)
                face = colour if block.filled else "white"
                axes.plot([interval.mean], [y], "o", color=colour, markerfacecolor=face, markersize=5)
                if block.part.estimand != "parity":
                    axes.plot([-margin, margin], [y, y], "|", color="#999999", markersize=8)
        y += 1.0
    axes.axvline(0.0, color="#444444", linewidth=0.8)
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(y - 0.4, -0.7)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"points{blocks[0].per}  (grey: the margin)")
