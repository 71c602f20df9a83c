# The figures of layers: multipliers of one diagnosis, alignment by layer and step of a training.
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._axes import LONGEST, empty, labels, plain_ticks, styled
from affine_divergence.diagnostics._records import Diagnosis, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 60  # calls in one figure
VERDICT_COLOURS = {"ok": "#1b1b1b", "look": "#9a6700", "broken": "#b3261e"}
_BANDS = (  # what is drawn of a call: how far above its middle, width of the bar, colour, marker, name, field
    (0.2, 4.0, "#0072B2", "o", "the optimiser's step", "multiplier_{}"),
    (-0.05, 4.0, "#E69F00", "D", "plain gradient descent", "multiplier_{}_plain"),
    (-0.28, 1.5, "#666666", "|", "a row alone (Gᵢᵢ)", "self_term_{}"),
)


@styled
def multiplier_figure(diagnosis: Diagnosis) -> Figure:
    """The multipliers of each call on a log scale, in the order of the calls: 5th to 95th percentile of its rows, and median."""
    rows = _shown(diagnosis)
    names = labels([(row.module, row.call) for row in rows])
    figure, axes = empty(_width(names), (0.36 if len(rows) <= 20 else 0.28) * max(len(rows), 2) + 1.9)
    axes.set_xscale("log")
    sizes = diagnosis.about.get("inputs", {})
    low, high = _limits(rows, sizes)
    axes.set_xlim(low, high)
    plain_ticks(axes, low, high)
    axes.axvline(1.0, color="#009E73", linewidth=1.2, label="1: a corrected layer’s ideal")
    ideal = [(sizes[row.module] + 1, -place) for place, row in enumerate(rows) if row.module in sizes]
    if ideal:
        look: dict[str, Any] = {"color": "#CC79A7", "markersize": 19, "markeredgewidth": 1.6}
        axes.plot(*zip(*ideal, strict=True), "|", label="d + 1: inputs of unit variance", **look)
    beyond = False
    for above, width, colour, marker, name, field in _BANDS:
        label: str | None = name
        for place, row in enumerate(rows):
            ends = [getattr(row, field.format(of)) for of in ("p5", "median", "p95")]
            if all(map(math.isfinite, ends)):
                beyond |= _band(axes, ends, above - place, low, {"color": colour, "linewidth": width, "marker": marker, "label": label})
                label = None
    _name_calls(axes, rows, names)
    axes.set_xlabel("multiplier  (bar: 5th to 95th percentile of the rows; point: median)", fontsize=9)
    axes.set_title(_title(diagnosis, rows, f"Step {diagnosis.step}"), loc="left")
    if beyond:
        axes.annotate(
            "◁ reaches zero or below, where rows are pushed uphill: no log scale shows it",
            (0, 0),
            (0, -42),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=9,
            color="#444444",
            annotation_clip=False,
        )
    figure.legend(loc="outside upper left", ncols=3, fontsize=9)
    return figure


@styled
def alignment_figure(diagnoses: Sequence[Diagnosis]) -> Figure:
    """The median alignment of each call at each step: blue with its own gradient, red against it."""
    if not diagnoses:
        raise ValueError("wanted at least one diagnosis, got none")
    found: dict[tuple[str, int], dict[int, float]] = {}
    for place, one in enumerate(diagnoses):
        for row in one.rows:
            found.setdefault((row.module, row.call), {})[place] = row.alignment_median
    least = {key: min((value for value in values.values() if not math.isnan(value)), default=1.0) for key, values in found.items()}
    kept = set(sorted(found, key=lambda key: least[key])[:MOST])
    keys = [key for key in found if key in kept]
    names = labels(keys)
    figure, axes = empty(_width(names), 0.22 * max(len(keys), 2) + 1.5)
    picture = axes.imshow(
        [[found[key].get(place, math.nan) for place in range(len(diagnoses))] for key in keys] or [[math.nan] * len(diagnoses)],
        cmap="RdBu",
        vmin=-1.0,
        vmax=1.0,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_facecolor("#bdbdbd")
    axes.set_yticks(range(len(keys)), names, fontsize=9)
    marked = _spaced(len(diagnoses), 10)
    axes.set_xticks(marked, [str(diagnoses[place].step) for place in marked])
    axes.grid(visible=False)
    axes.set_xlabel("step  (grey: not measured)")
    if len(keys) < len(found):
        axes.set_title(f"The {len(keys)} of {len(found)} calls whose alignment was lowest", loc="left")
    shrink = min(1.0, 4.0 / figure.get_figheight() + 0.2)
    figure.colorbar(picture, ax=axes, label="median alignment", ticks=[-1, -0.5, 0, 0.5, 1], shrink=shrink)
    return figure


def _shown(diagnosis: Diagnosis) -> list[Row]:
    worst = {id(row) for row in diagnosis.worst()[:MOST]}
    return [row for row in diagnosis.rows if id(row) in worst]


def _title(diagnosis: Diagnosis, rows: Sequence[Row], said: str) -> str:
    return said if len(rows) == len(diagnosis.rows) else f"{said}: the {len(rows)} worst of {len(diagnosis.rows)} calls"


def _limits(rows: Sequence[Row], sizes: Any) -> tuple[float, float]:
    ends = [getattr(row, field.format(of)) for row in rows for *_, field in _BANDS for of in ("p5", "median", "p95")]
    there = [1.0, *(end for end in ends if 0.0 < end < math.inf), *(sizes[row.module] + 1.0 for row in rows if row.module in sizes)]
    return min(there) / 3, max(there) * 2


def _band(axes: Axes, ends: Sequence[float], y: float, low: float, look: Any) -> bool:
    """Draw what a log scale shows of it; whether some of it lies at zero or below."""
    p5, middle, p95 = ends
    colour, size = look["color"], 9 if look["marker"] == "|" else 5
    if p95 > 0:
        axes.plot([max(p5, low), p95], [y, y], color=colour, linewidth=look["linewidth"], alpha=0.45, solid_capstyle="butt")
    point = [middle] if middle > 0 else []
    axes.plot(point, [y] * len(point), look["marker"], color=colour, markersize=size, markeredgewidth=1.5, label=look["label"])
    if p5 <= 0:
        axes.plot([low], [y], "<", color=colour, markerfacecolor="white", markersize=7, clip_on=False, zorder=5)
    return p5 <= 0


def _name_calls(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    axes.set_yticks([-place for place in range(len(rows))], names, fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(VERDICT_COLOURS[row.verdict])
        label.set_fontweight("normal" if row.verdict == "ok" else "bold")
    axes.set_ylim(0.6 - max(len(rows), 1), 0.6)


def _width(names: Sequence[str]) -> float:
    """Of a figure, so that the axes keep their width beside names that are told apart by many letters only."""
    return 9.4 + 0.08 * max(0, max(map(len, names), default=0) - LONGEST - 10)


def _spaced(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
