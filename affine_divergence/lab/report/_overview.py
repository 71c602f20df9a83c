# The overview: accuracies and leads of all methods against width, depth and batch size.
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from affine_divergence.lab.report._style import COLOURS, MARKERS, STYLE, draw_interval, svg
from affine_divergence.lab.summary import REFERENCE, MethodRow, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from affine_divergence.lab.statistics import Interval

AXES = {"width": "neurons in a hidden layer", "depth": "hidden layers", "batch_size": "batch size"}
FEWEST = 3  # points that make a line worth drawing
DODGE = 0.07  # between neighbouring methods, in doublings or layers


@dataclass(frozen=True)
class Sweep:
    """Settings that differ in one axis alone, in its order."""

    axis: str
    settings: tuple[Setting, ...]

    @property
    def title(self) -> str:
        cell, rate_from = self.settings[0].cell, next((one.rate_from for one in self.settings if one.rate_from), None)
        parts = {
            "depth": f"{cell.depth} layer{'s' if cell.depth > 1 else ''}",
            "width": f"width {cell.width}",
            "activation": cell.activation,
            "batch_size": f"batch {cell.batch_size}",
            "budget": self.settings[0].budget,
        }
        rate = f"\nat the rate of batch {rate_from}" if rate_from else "\nrates tuned for each size" if self.axis == "batch_size" else ""
        return ", ".join(text for name, text in parts.items() if name != self.axis) + rate


def sweeps(settings: Sequence[Setting]) -> list[Sweep]:
    """Every line of at least three settings along width, depth or batch size, like beside like."""
    found = []
    for axis in AXES:
        lines: dict[tuple[object, int | None], list[Setting]] = {}
        for setting in settings:
            fixed = asdict(setting.cell) | {"method": None, axis: None}
            lines.setdefault((tuple(fixed.values()), setting.rate_from), []).append(setting)
        if axis == "batch_size":
            lines = {key: _completed(line, lines.get((key[0], None), [])) for key, line in lines.items()}
        for line in sorted((line for line in lines.values() if len(line) >= FEWEST), key=lambda line: _order(line[0])):
            found.append(Sweep(axis, tuple(sorted(line, key=lambda setting: getattr(setting.cell, axis)))))
    return found


def overview(found: Sequence[Sweep]) -> dict[str, tuple[str, str]]:
    """Captions and figures by file name, two sweeps beside each other in each."""
    figures = {}
    for axis, group in itertools.groupby(found, key=lambda sweep: sweep.axis):
        for number, pair in enumerate(_pairs(list(group)), 1):
            caption = (
                f"Against {AXES[axis]}: test accuracy at the chosen learning rates, and below it the lead of {REFERENCE} over each other "
                "method, paired by seed. Means over seeds with 95 % intervals"
            )
            figures[f"by-{axis.replace('_', '-')}-{number}"] = (caption, sweep_figure(pair))
    return figures


def sweep_figure(pair: Sequence[Sweep]) -> str:
    """Accuracies above, leads of the reference below, a column a sweep."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    methods = list(dict.fromkeys(row.cell.method for sweep in pair for setting in sweep.settings for row in setting.rows))
    with_leads = any(row.lead for sweep in pair for setting in sweep.settings for row in setting.rows)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1 + with_leads, 2, figsize=(9.4, 3.1 + 2.5 * with_leads), layout="constrained", sharey="row", sharex="col", squeeze=False
        )
        for column, sweep in zip(grid.T, pair, strict=False):
            column[0].set_title(sweep.title)
            for place, method in enumerate(methods):
                shift = DODGE * (place - (len(methods) - 1) / 2)
                rows = [(setting, row) for setting in sweep.settings for row in setting.rows if row.cell.method == method]
                _line(column[0], sweep.axis, shift, [(s, row, row.accuracy.scaled(100.0)) for s, row in rows])
                if with_leads:
                    _line(column[1], sweep.axis, shift, [(s, row, row.lead.interval.scaled(100.0)) for s, row in rows if row.lead])
            column[-1].set_xlabel(AXES[sweep.axis])
            _ticks(column[-1], sweep)
        for unused in grid.T[len(pair) :].flat:
            unused.set_axis_off()
        grid[0, 0].set_ylabel("test accuracy, %")
        if with_leads:
            grid[1, 0].set_ylabel(f"lead of {REFERENCE}, points")
            for axes in grid[1, : len(pair)]:
                axes.axhline(0.0, color="#0072B2", linewidth=1)
        handles = [Line2D([], [], color=COLOURS[m], marker=MARKERS[m], markersize=6, linewidth=1.3, label=m) for m in methods]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(methods))
        return svg(figure)


def _line(axes: Axes, axis: str, shift: float, points: Sequence[tuple[Setting, MethodRow, Interval]]) -> None:
    places = []
    for setting, row, interval in points:
        x = getattr(setting.cell, axis)
        places.append(x + shift if axis == "depth" else math.log2(x) + shift)
        draw_interval(axes, places[-1], interval, row.cell.method)
    if points:
        axes.plot(places, [interval.mean for _, _, interval in points], color=COLOURS[points[0][1].cell.method], linewidth=0.9)


def _ticks(axes: Axes, sweep: Sweep) -> None:
    values = [getattr(setting.cell, sweep.axis) for setting in sweep.settings]
    axes.set_xticks([value if sweep.axis == "depth" else math.log2(value) for value in values], [str(value) for value in values])


def _completed(line: list[Setting], tuned: Sequence[Setting]) -> list[Setting]:
    # At the batch size whose rate is kept, that rate is the tuned one.
    size = line[0].rate_from
    if size is None or any(one.cell.batch_size == size for one in line):
        return line
    return [*line, *(one for one in tuned if one.cell.batch_size == size)]


def _pairs(group: Sequence[Sweep]) -> list[Sequence[Sweep]]:
    return [group[start : start + 2] for start in range(0, len(group), 2)]


def _order(setting: Setting) -> tuple[object, ...]:
    cell = setting.cell
    return cell.activation != "tanh", cell.epochs is None, cell.depth, cell.width, setting.rate_from or 0, cell.batch_size
