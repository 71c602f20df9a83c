# The figures of a diagnosis: multipliers by layer, alignment by layer and step, the rows of one layer.
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._records import Diagnosis, Row, Samples
from affine_divergence.diagnostics._style import STYLE
from affine_divergence.diagnostics._tables import name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
MOST = 60  # calls in one figure
LABELLED = 10  # rows of a scatter that are named
VERDICT_COLOURS = {"ok": "#1b1b1b", "look": "#9a6700", "broken": "#b3261e"}
_BANDS = (  # what is drawn of a call: how far above its middle, width of the bar, colour, marker, name, field
    (0.2, 4.0, "#0072B2", "o", "the optimiser's step", "multiplier_{}"),
    (-0.05, 4.0, "#E69F00", "D", "plain gradient descent", "multiplier_{}_plain"),
    (-0.28, 1.5, "#666666", "|", "a row alone (Gᵢᵢ)", "self_term_{}"),
)


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with needed_for("a figure"):
            import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


@_styled
def multiplier_figure(diagnosis: Diagnosis) -> Figure:
    """The multipliers of each call on a log scale, in the order of the calls: 5th to 95th percentile of its rows, and median."""
    rows = _shown(diagnosis)
    figure, axes = _empty(9.4, (0.36 if len(rows) <= 20 else 0.28) * max(len(rows), 2) + 1.9)
    axes.set_xscale("log")
    sizes = diagnosis.about.get("inputs", {})
    low, high = _limits(rows, sizes)
    axes.set_xlim(low, high)
    _plain_ticks(axes, low, high)
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
    _name_calls(axes, rows)
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


@_styled
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
    several = any(call for _, call in keys)
    figure, axes = _empty(9.4, 0.22 * max(len(keys), 2) + 1.5)
    picture = axes.imshow(
        [[found[key].get(place, math.nan) for place in range(len(diagnoses))] for key in keys] or [[math.nan] * len(diagnoses)],
        cmap="RdBu",
        vmin=-1.0,
        vmax=1.0,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_facecolor("#bdbdbd")
    axes.set_yticks(range(len(keys)), [_label(module, call, several) for module, call in keys], fontsize=9)
    marked = _spaced(len(diagnoses), 10)
    axes.set_xticks(marked, [str(diagnoses[place].step) for place in marked])
    axes.grid(visible=False)
    axes.set_xlabel("step  (grey: not measured)")
    if len(keys) < len(found):
        axes.set_title(f"The {len(keys)} of {len(found)} calls whose alignment was lowest", loc="left")
    shrink = min(1.0, 4.0 / figure.get_figheight() + 0.2)
    figure.colorbar(picture, ax=axes, label="median alignment", ticks=[-1, -0.5, 0, 0.5, 1], shrink=shrink)
    return figure


@_styled
def scatter_figure(samples: Samples) -> Figure:
    """Each row of a call, multiplier against alignment, coloured by the size of its gradient; the extreme ones named by their place."""
    from matplotlib.colors import LogNorm, Normalize

    places = drawable(samples)
    figure, axes = _empty(9.4, 4.6, dpi=200)  # the points are one picture in the SVG
    x, y, sizes = ([values[i] for i in places] for values in (samples.multiplier, samples.alignment, samples.gradient))
    if x:
        positive = min(x) > 0
        scale: dict[str, Any] = {} if positive else {"linthresh": max(sorted(map(abs, x))[len(x) // 4], max(map(abs, x)) * 1e-6)}
        if max(map(abs, x)) > 0:
            axes.set_xscale("log" if positive else "symlog", **scale)
            _plain_ticks(axes, *((min(x), max(x)) if positive else (0.0, 0.0)))
        low, high = min(sizes), max(sizes)
        wide = high > 3 * low
        norm, ticks = (LogNorm(low, high), [low, math.sqrt(low * high), high]) if wide else (Normalize(0.0, high), [0.0, high / 2, high])
        points = axes.scatter(x, y, c=sizes, norm=norm, cmap="viridis", s=14, alpha=0.8, linewidth=0, rasterized=True)
        figure.colorbar(points, ax=axes, label="‖gradient‖ of the row", ticks=ticks, format="{x:.2g}").minorticks_off()
    axes.axhline(0.0, color="#444444", linewidth=0.8)
    axes.set_ylim(-1.08, 1.08)
    axes.set_xlabel(f"multiplier{'' if not x or min(x) > 0 else ' (below 0: pushed uphill)'}")
    axes.set_ylabel("alignment")
    of = "" if len(samples.index) == samples.total else f" of {samples.total:,}"
    masked = len(samples.index) - len(places)
    left_out = f", {masked:,} without a gradient left out" if masked else ""
    title = f"{_label(samples.module, samples.call, samples.call > 0)}: {len(samples.index):,}{of} rows{left_out}"
    axes.set_title(title, loc="left")
    figure.draw_without_rendering()  # now it is known what lies where
    _name_rows(axes, samples)
    return figure


def drawable(samples: Samples) -> list[int]:
    """The rows of a scatter that have a point: with a gradient and finite numbers."""
    numbers = zip(samples.multiplier, samples.alignment, samples.gradient, strict=True)
    return [i for i, (m, a, g) in enumerate(numbers) if g > 0 and all(map(math.isfinite, (m, a, g)))]


def extreme(samples: Samples) -> list[int]:
    """The rows to be named, most extreme first: by lowest alignment and by the multiplier farthest from the median in turn."""
    places = drawable(samples)
    if not places:
        return []
    middle = sorted(samples.multiplier[i] for i in places)[len(places) // 2]
    logs = middle > 0 and all(samples.multiplier[i] > 0 for i in places)
    far: Callable[[float], float] = (lambda m: abs(math.log(m / middle))) if logs else (lambda m: abs(m - middle))
    by_alignment = sorted(places, key=lambda i: samples.alignment[i])
    by_multiplier = sorted(places, key=lambda i: -far(samples.multiplier[i]))
    found = dict.fromkeys(i for pair in zip(by_alignment, by_multiplier, strict=True) for i in pair)
    return list(found)[:LABELLED]


def index_of(samples: Samples, place: int) -> str:
    """Where a kept row stands in the layer's input: its indices along the axes."""
    flat, indices = samples.index[place], []
    for size in reversed(samples.axes):
        flat, index = divmod(flat, size)
        indices.append(index)
    return ", ".join(map(str, reversed(indices)))


def _empty(width: float, height: float, dpi: float = 100) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")  # not pyplot's: nothing to close, and no window
    return figure, figure.add_subplot()


def _plain_ticks(axes: Axes, low: float, high: float) -> None:
    """Numbers without powers, and three a decade where there are few decades; a symmetric scale keeps its places."""
    from matplotlib.ticker import LogLocator

    if low > 0:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=12))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")


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


def _name_calls(axes: Axes, rows: Sequence[Row]) -> None:
    several = any(row.call for row in rows)
    axes.set_yticks([-place for place in range(len(rows))], [_label(row.module, row.call, several) for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(VERDICT_COLOURS[row.verdict])
        label.set_fontweight("normal" if row.verdict == "ok" else "bold")
    axes.set_ylim(0.6 - max(len(rows), 1), 0.6)


def _name_rows(axes: Axes, samples: Samples) -> None:
    # At the first of four corners of the point where the name lies on no other and inside the axes; else it has none.
    unit = axes.get_figure().dpi / 72  # type: ignore[union-attr]
    within, taken = axes.get_window_extent(), list[tuple[float, float, float]]()
    for i in extreme(samples):
        name, point = index_of(samples, i), (samples.multiplier[i], samples.alignment[i])
        x, y = axes.transData.transform(point)
        width, height = 4.6 * len(name) * unit, 10 * unit
        for right, up in ((True, True), (True, False), (False, True), (False, False)):
            left, bottom = x + (8 * unit if right else -8 * unit - width), y + (8 * unit if up else -8 * unit - height)
            inside = within.x0 <= left and left + width <= within.x1 and within.y0 <= bottom and bottom + height <= within.y1
            if inside and all(abs(bottom - b) > height or left + width < a or a + w < left for a, b, w in taken):
                taken.append((left, bottom, width))
                axes.annotate(
                    name,
                    point,
                    (8 if right else -8, 8 if up else -8),
                    textcoords="offset points",
                    fontsize=8,
                    ha="left" if right else "right",
                    va="bottom" if up else "top",
                    arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
                )
                break


def _label(module: str, call: int, several: bool) -> str:
    name = name_of(module)
    short = name if len(name) <= 36 else f"…{name[-35:]}"
    return (f"{short}, call {call}" if several else short).replace("$", r"\$")  # no formula


def _spaced(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
