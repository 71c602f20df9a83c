# What the figures share: an empty one in their style, short numbers beside an axis, the names of calls.
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._style import STYLE
from affine_divergence.diagnostics._tables import cut, name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
LONGEST = 36  # letters of a name beside an axis


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with needed_for("a figure"):
            import matplotlib as mpl

        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


def empty(width: float, height: float, dpi: float = 100) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")  # not pyplot's: nothing to close, and no window
    return figure, figure.add_subplot()


def plain_ticks(axes: Axes, low: float, high: float) -> None:
    """Short numbers, and three a decade where there are few decades; a symmetric scale keeps its places."""
    from matplotlib.ticker import LogLocator

    if low > 0:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,), numticks=12))
    axes.xaxis.set_major_formatter(lambda x, _: tick(x))
    axes.xaxis.set_minor_formatter("")


def tick(value: float) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:g}").replace("-", "−")


def labels(calls: Sequence[tuple[str, int]], longest: int = LONGEST) -> list[str]:
    several = any(call for _, call in calls)
    short = cut([name_of(module) for module, _ in calls], longest)
    named = zip(short, (call for _, call in calls), strict=True)
    return [(f"{name}, call {call}" if several else name).replace("$", r"\$") for name, call in named]  # no formula
