# The rows of one call, multiplier against alignment, the extreme ones named.
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from affine_divergence.diagnostics._axes import empty, labels, plain_ticks, styled, tick
from affine_divergence.diagnostics._records import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

LABELLED = 10  # rows that are named
_TITLE = 60  # letters of a name in the title
_LETTER, _SMALL = 6.0, 4.6  # points that a letter of a number, and one of a row's name, is wide
_CLEAR = 4  # points between the names of two rows
_OFFSETS = [
    (x, y) for far in (8, 20, 36, 60) for x, y in ((far, 8), (far, -8), (-far, 8), (-far, -8), (8, far), (8, -far), (-8, far), (-8, -far))
]


@styled
def scatter_figure(samples: Samples) -> Figure:
    """Each row of a call, multiplier against alignment, coloured by the size of its gradient; the extreme ones named by their place."""
    from matplotlib.colors import LogNorm, Normalize

    places = drawable(samples)
    figure, axes = empty(9.4, 4.6, dpi=200)  # the points are one picture in the SVG
    x, y, sizes = ([values[i] for i in places] for values in (samples.multiplier, samples.alignment, samples.gradient))
    if x:
        positive = min(x) > 0
        scale: dict[str, Any] = {} if positive else {"linthresh": max(sorted(map(abs, x))[len(x) // 4], max(map(abs, x)) * 1e-6)}
        if max(map(abs, x)) > 0:
            axes.set_xscale("log" if positive else "symlog", **scale)
            plain_ticks(axes, *((min(x), max(x)) if positive else (0.0, 0.0)))
        low, high = min(sizes), max(sizes)
        wide = high > 3 * low
        norm, ticks = (LogNorm(low, high), [low, math.sqrt(low * high), high]) if wide else (Normalize(0.0, high), [0.0, high / 2, high])
        points = axes.scatter(x, y, c=sizes, norm=norm, cmap="viridis", s=14, alpha=0.8, linewidth=0, rasterized=True)
        bar = figure.colorbar(points, ax=axes, ticks=ticks, format=lambda size, _: tick(float(f"{size:.2g}")))
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
    (name,) = labels([(samples.module, samples.call)], _TITLE)
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
        x, half = axes.transData.transform((value, 0.0))[0], 0.5 * _LETTER * axes.figure.dpi / 72 * (len(tick(value)) + 2)
        if all(abs(x - other) >= half + width for other, width in taken.items()):
            taken[x] = half
            yield value


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
