# The figures of a diagnosis: multipliers by layer, alignment by layer and step, the rows of one layer.
from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._records import Diagnosis, Row, Samples
from affine_divergence.diagnostics._style import STYLE
from affine_divergence.diagnostics._tables import cut, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

P = ParamSpec("P")
MOST = 60  # calls in one figure
LABELLED = 10  # rows of a scatter that are named
_LONGEST, _TITLE = 36, 60  # letters of a name beside an axis, and in a title
_LETTER, _SMALL = 6.0, 4.6  # points that a letter of a number, and one of a row's name, is wide
_CLEAR = 4  # points between the names of two rows
_OFFSETS = [
    (x, y) for far in (8, 20, 36, 60) for x, y in ((far, 8), (far, -8), (-far, 8), (-far, -8), (8, far), (8, -far), (-8, far), (-8, -far))
]
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
    names = _labels([(row.module, row.call) for row in rows])
    figure, axes = _empty(_width(names), (0.36 if len(rows) <= 20 else 0.28) * max(len(rows), 2) + 1.9)
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
    names = _labels(keys)
    figure, axes = _empty(_width(names), 0.22 * max(len(keys), 2) + 1.5)
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
        bar = figure.colorbar(points, ax=axes, ticks=ticks, format=lambda size, _: _tick(float(f"{size:.2g}")))
        bar.set_label("‖gradient‖ of the row", labelpad=10)
        bar.minorticks_off()
    axes.axhline(0.0, color="#444444", linewidth=0.8)
    axes.set_ylim(-1.08, 1.08)
    axes.margins(x=0.12)  # room for names
    axes.set_xlabel(f"multiplier{'' if not x or min(x) > 0 else ' (below 0: pushed uphill)'}")
    axes.set_ylabel("alignment")
    of = "" if len(samples.index) == samples.total else f" of {samples.total:,}"
    masked = sum(size == 0 for size in samples.gradient)
    counts = {"without a gradient": masked, "not finite": len(samples.index) - len(places) - masked}
    left_out = "".join(f", {count:,} {what} left out" for what, count in counts.items() if count)
    (name,) = _labels([(samples.module, samples.call)], _TITLE)
    title = f"{name}: {len(samples.index):,}{of} rows{left_out}"
    axes.set_title(title, loc="left")
    figure.draw_without_rendering()  # now it is known what lies where
    if axes.get_xscale() == "symlog":
        axes.set_xticks(list(_apart(axes)))
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
    """Where a kept row stands in the layer's input: its index, or in brackets its indices along the axes."""
    flat, indices = samples.index[place], []
    for size in reversed(samples.axes):
        flat, index = divmod(flat, size)
        indices.append(index)
    return str(indices[0]) if len(indices) == 1 else f"({', '.join(map(str, reversed(indices)))})"


def _empty(width: float, height: float, dpi: float = 100) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")  # not pyplot's: nothing to close, and no window
    return figure, figure.add_subplot()


def _plain_ticks(axes: Axes, low: float, high: float) -> None:
    """Short numbers, and three a decade where there are few decades; a symmetric scale keeps its places."""
    from matplotlib.ticker import LogLocator

    if low > 0:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=12))
    axes.xaxis.set_major_formatter(lambda x, _: _tick(x))
    axes.xaxis.set_minor_formatter("")


def _tick(value: float) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}").replace("-", "−")


def _apart(axes: Axes) -> Iterator[float]:
    """0 and the powers of ten of a symmetric scale, from the largest down, where their numbers do not touch; more where these are few."""
    low, high = axes.get_xlim()
    largest = math.ceil(math.log10(max(-low, high)))
    powers = [sign * 10.0**power for power in range(largest, largest - 12, -1) for sign in (1, -1)]
    values = [value for value in (0.0, *powers) if low <= value <= high]
    if len(values) < 2:
        between = [factor * power for power in powers for factor in (2.0, 5.0)]
        values += [value for value in (*between, float(f"{(low + high) / 2:.2g}")) if low <= value <= high]
    taken = dict[float, float]()
    for value in values:
        x, half = axes.transData.transform((value, 0.0))[0], 0.5 * _LETTER * axes.figure.dpi / 72 * (len(_tick(value)) + 2)
        if all(abs(x - other) >= half + width for other, width in taken.items()):
            taken[x] = half
            yield value


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


def _name_rows(axes: Axes, samples: Samples) -> None:
    """Beside the point, at the nearest place inside the axes where the name lies on no other and on no point; without one it has none."""
    unit = axes.figure.dpi / 72
    within, names = axes.get_window_extent(), list[_Box]()
    points = axes.transData.transform([(samples.multiplier[i], samples.alignment[i]) for i in drawable(samples)])
    for i in extreme(samples):
        name, point = index_of(samples, i), (samples.multiplier[i], samples.alignment[i])
        x, y = axes.transData.transform(point)
        for right, up in _OFFSETS:
            box = _Box.beside(x + right * unit, y + up * unit, _SMALL * len(name) * unit, 10 * unit, right > 0, up > 0)
            inside = within.x0 <= box.left and box.right <= within.x1 and within.y0 <= box.bottom and box.top <= within.y1
            if inside and not any(box.grown(_CLEAR * unit).overlaps(other) for other in names) and not box.grown(2 * unit).holds(points):
                names.append(box)
                axes.annotate(
                    name,
                    point,
                    (right, up),
                    textcoords="offset points",
                    fontsize=8,
                    ha="left" if right > 0 else "right",
                    va="bottom" if up > 0 else "top",
                    arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
                )
                break


class _Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def beside(cls, x: float, y: float, width: float, height: float, right: bool, up: bool) -> _Box:
        left, bottom = x - width * (not right), y - height * (not up)
        return cls(left, bottom, left + width, bottom + height)

    def grown(self, by: float) -> _Box:
        return _Box(self.left - by, self.bottom - by, self.right + by, self.top + by)

    def overlaps(self, other: _Box) -> bool:
        return self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top

    def holds(self, points: NDArray[Any]) -> bool:
        x, y = points.T
        return bool(((self.left <= x) & (x <= self.right) & (self.bottom <= y) & (y <= self.top)).any())


def _labels(calls: Sequence[tuple[str, int]], longest: int = _LONGEST) -> list[str]:
    several = any(call for _, call in calls)
    short = cut([name_of(module) for module, _ in calls], longest)
    named = zip(short, (call for _, call in calls), strict=True)
    return [(f"{name}, call {call}" if several else name).replace("$", r"\$") for name, call in named]  # no formula


def _width(names: Sequence[str]) -> float:
    """Of a figure, so that the axes keep their width beside names that are told apart by many letters only."""
    return 9.4 + 0.08 * max(0, max(map(len, names), default=0) - _LONGEST - 10)


def _spaced(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
