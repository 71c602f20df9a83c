# The look of the methods in all figures: colours, markers, lines.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._style import STYLE as STYLE, compact as compact, svg as svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from affine_divergence.lab.statistics import Interval

COLOURS = {  # Okabe and Ito's palette: told apart with any colour vision
    "none": "#000000",
    "batch-norm": "#009E73",
    "layer-norm": "#CC79A7",
    "layer-norm-sample": "#CC79A7",
    "layer-norm-position": "#CC79A7",
    "rms-norm": "#E69F00",
    "rms-norm-sample": "#E69F00",
    "rms-norm-position": "#E69F00",
    "norm-like": "#D55E00",
    "norm-like-gain": "#D55E00",
    "affine-like": "#0072B2",
    "affine-like-gain": "#0072B2",
    "sample": "#999999",
    "batch": "#56B4E9",
    "foof": "#56B4E9",
}
MARKERS = {
    "none": "o",
    "batch-norm": "s",
    "layer-norm": "^",
    "layer-norm-sample": "^",
    "layer-norm-position": "<",
    "rms-norm": "v",
    "rms-norm-sample": "v",
    "rms-norm-position": ">",
    "norm-like": "D",
    "norm-like-gain": "d",
    "affine-like": "*",
    "affine-like-gain": "p",
    "sample": "X",
    "batch": "P",
    "foof": "h",
}
# Lines, with hollow markers: beside the like per sample, at gain 1, or without an average, of one colour.
BROKEN = ("layer-norm-position", "rms-norm-position", "norm-like-gain", "affine-like-gain", "foof")


def colour_of(name: str) -> str:
    """The colour of a method, whatever its gain."""
    return COLOURS[_method(name)]


def line_look(name: str) -> dict[str, Any]:
    """How the lines of a method, with its gain if it has one, are drawn."""
    return {"color": colour_of(name), "linestyle": (0, (4, 2)) if _broken(name) else "-"}


def look(name: str) -> dict[str, Any]:
    """How a method's lines and points are drawn."""
    return line_look(name) | {"marker": MARKERS[_method(name)], "markerfacecolor": "white" if _broken(name) else colour_of(name)}


def _method(name: str) -> str:
    return name.partition(" gain ")[0]


def _broken(name: str) -> bool:
    return name in BROKEN or " gain " in name


def legend_columns(count: int) -> int:
    """How many methods stand beside each other in a legend under a figure."""
    return count if count <= 6 else -(-count // 2)


def draw_interval(axes: Axes, x: float, interval: Interval, name: str) -> None:
    """A point with its interval, where it has one."""
    colour = colour_of(name)
    if interval.n > 1:
        axes.plot([x, x], [interval.low, interval.high], color=colour, linewidth=1.3)
    point: dict[str, Any] = {"color": colour, "markersize": 8 if name == "affine-like" else 5, "markeredgewidth": 0}
    if _broken(name):
        point |= {"markerfacecolor": "white", "markeredgewidth": 1}
    axes.plot([x], [interval.mean], MARKERS[_method(name)], **point)
