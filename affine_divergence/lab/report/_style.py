# The look that all figures share: colours, markers, small SVG.
from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text as text: a quarter of the size of its outlines, and it can be searched
    "svg.hashsalt": "affine-divergence",
    "xtick.minor.size": 0,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def svg(figure: Figure) -> str:
    """The figure as SVG, made small; closes it."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    plt.close(figure)
    return compact(buffer.getvalue())


def compact(text: str) -> str:
    """The same picture in a third of the bytes: each style written once, a hundredth of a point for coordinates, no idle ids and groups."""
    text = re.sub(r"<!--.*?-->|<!DOCTYPE.*?>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*\n\s*", " ", re.sub(r">\s+<", "><", text)).strip() + "\n"
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", found[0]), text)
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    classes: dict[str, str] = {}
    text = re.sub(r' style="([^"]*)"', lambda found: f' class="{classes.setdefault(found[1], f"c{len(classes)}")}"', text)
    rules = "".join(f".{name}{{{style}}}" for style, name in classes.items())
    text = text.replace("</style>", f"{rules}</style>", 1)
    before = ""
    while before != text:
        before, text = text, re.sub(r"<g>((?:<(?:path|use|text)\b[^>]*/>)*|<text\b[^>]*>[^<]*</text>)</g>", r"\1", text)
    return text


def line_look(method: str) -> dict[str, Any]:
    """How a method's lines are drawn."""
    return {"color": COLOURS[method], "linestyle": (0, (4, 2)) if method in BROKEN else "-"}


def look(method: str) -> dict[str, Any]:
    """How a method's lines and points are drawn."""
    return line_look(method) | {"marker": MARKERS[method], "markerfacecolor": "white" if method in BROKEN else COLOURS[method]}


def legend_columns(count: int) -> int:
    """How many methods stand beside each other in a legend under a figure."""
    return count if count <= 6 else -(-count // 2)


def draw_interval(axes: Axes, x: float, interval: Interval, method: str) -> None:
    """A point with its interval, where it has one."""
    colour = COLOURS[method]
    if interval.n > 1:
        axes.plot([x, x], [interval.low, interval.high], color=colour, linewidth=1.3)
    point: dict[str, Any] = {"color": colour, "markersize": 8 if method == "affine-like" else 5, "markeredgewidth": 0}
    if method in BROKEN:
        point |= {"markerfacecolor": "white", "markeredgewidth": 1}
    axes.plot([x], [interval.mean], MARKERS[method], **point)
