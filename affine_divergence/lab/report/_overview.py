# The overview: accuracies and leads of all methods against width, depth and batch size, or by architecture.
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from affine_divergence.lab.report._style import STYLE, draw_interval, legend_columns, line_look, look, svg
from affine_divergence.lab.report._sweeps import Sweep
from affine_divergence.lab.summary import REFERENCE, MethodRow, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from affine_divergence.lab.statistics import Interval

DODGE = 0.07  # between neighbouring methods, in doublings, layers or architectures
MOST_LEVEL = 5  # architectures whose names stand beside each other


def overview(found: Sequence[Sweep]) -> dict[str, tuple[str, str]]:
    """Captions and figures by file name, two sweeps beside each other in each."""
    figures = {}
    numbers: Counter[str] = Counter()
    for (axis, quantity), group in itertools.groupby(found, key=lambda sweep: (sweep.axis, sweep.quantity)):
        where = {"architecture": f"By architecture ({quantity})", "start": "By start"}.get(axis, f"Against {quantity}")
        for pair in _pairs(list(group)):
            numbers[axis] += 1
            leads = f", and below it the lead of {REFERENCE} over each other method, paired by seed" if _with_leads(pair) else ""
            caption = f"{where}: test accuracy at the chosen learning rates{leads}. Means over seeds with 95 % intervals"
            figures[f"by-{axis.replace('_', '-')}-{numbers[axis]}"] = (caption, sweep_figure(pair))
    return figures


def sweep_figure(pair: Sequence[Sweep]) -> str:
    """Accuracies above, leads of the reference below, a column a sweep."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    methods = list(dict.fromkeys(method for sweep in pair for method in sweep.methods))
    with_leads = _with_leads(pair)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1 + with_leads, 2, figsize=(9.4, 3.1 + 2.5 * with_leads), layout="constrained", sharey="row", sharex="col", squeeze=False
        )
        for column, sweep in zip(grid.T, pair, strict=False):
            column[0].set_title(sweep.title)
            for place, method in enumerate(methods):
                shift = DODGE * (place - (len(methods) - 1) / 2)
                rows = [(s, row) for s in sweep.settings for row in s.rows if row.cell.name == method and method in sweep.methods]
                _line(column[0], sweep, shift, [(s, row, row.accuracy.scaled(100.0)) for s, row in rows])
                if with_leads:
                    _line(column[1], sweep, shift, [(s, row, row.lead.interval.scaled(100.0)) for s, row in rows if row.lead])
            column[-1].set_xlabel(sweep.quantity)
            _ticks(column, sweep)
        for unused in grid.T[len(pair) :].flat:
            unused.set_axis_off()
        grid[0, 0].set_ylabel("test accuracy, %")
        if with_leads:
            grid[1, 0].set_ylabel(f"lead of {REFERENCE}, points")
            for axes in grid[1, : len(pair)]:
                axes.axhline(0.0, color="#0072B2", linewidth=1)
        handles = [Line2D([], [], **look(m), markersize=6, linewidth=1.3, label=m) for m in methods]
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns(len(methods)))
        return svg(figure)


def _with_leads(pair: Sequence[Sweep]) -> bool:
    return any(row.lead for sweep in pair for setting in sweep.settings for row in setting.rows)


def _line(axes: Axes, sweep: Sweep, shift: float, points: Sequence[tuple[Setting, MethodRow, Interval]]) -> None:
    places = []
    for setting, row, interval in points:
        places.append(sweep.x(setting) + shift)
        draw_interval(axes, places[-1], interval, row.cell.name)
    if points and sweep.ordered:
        axes.plot(places, [interval.mean for _, _, interval in points], **line_look(points[0][1].cell.name), linewidth=0.9)


def _ticks(column: Sequence[Axes], sweep: Sweep) -> None:
    labels = [sweep.label(setting) for setting in sweep.settings]
    column[-1].set_xticks([sweep.x(setting) for setting in sweep.settings], labels)
    if sweep.ordered:
        return
    for axes in column:
        axes.grid(visible=False, axis="x")
        for place in range(1, len(labels)):
            axes.axvline(place - 0.5, color="#dddddd", linewidth=0.8)
    column[-1].set_xlim(-0.5, len(labels) - 0.5)
    if len(labels) > MOST_LEVEL:
        column[-1].tick_params(axis="x", labelrotation=90)


def _pairs(group: Sequence[Sweep]) -> list[Sequence[Sweep]]:
    return [group[start : start + 2] for start in range(0, len(group), 2)]
