# Signal, gradient and Gram cosine through depth, a row of panels for each activation: lines are theory, dots means of random networks.
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from affine_divergence.lab.report._style import STYLE, svg
from affine_divergence.lab.theory._starts import STARTS, Followed, mean_of_logs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(STARTS, ("#000000", "#999999", "#E69F00", "#0072B2", "#56B4E9", "#009E73"), strict=True))
TITLES = {"tanh": "Tanh", "leaky_relu": "Leaky-ReLU", "relu": "ReLU", "linear": "no activation"}
PANELS = {"sqnorm": "signal ‖x‖²", "gradient": "gradient (1 at the last layer)", "gram_gap": "1 − κ"}
FLOOR = 1e-8


def starts_figure(found: Sequence[Followed]) -> str:
    """The figure as SVG: the signal, the gradient and 1 − κ after each hidden layer."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    kinds = list(dict.fromkeys(one.nonlinearity for one in found))
    with plt.rc_context(STYLE):
        size = (10.4, 3.0 * len(kinds) + 0.8)
        figure, grid = plt.subplots(len(kinds), len(PANELS), figsize=size, layout="constrained", squeeze=False, sharex=True)
        for row, kind in zip(grid, kinds, strict=True):
            for axes, (name, label) in zip(row, PANELS.items(), strict=True):
                for one in (one for one in found if one.nonlinearity == kind):
                    _draw(axes, one, name)
                axes.set_yscale("log")
                axes.yaxis.set_minor_locator(NullLocator())
                low, high = axes.get_ylim()
                axes.set_ylim(max(low, FLOOR), high)
                axes.set_title(f"{TITLES[kind]}: {label}", loc="left")
                axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in grid[-1]:
            axes.set_xlabel("hidden layers")
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return svg(figure)


def _draw(axes: Axes, one: Followed, name: str) -> None:
    theory = getattr(one.theory, name)
    layers = range(1, len(theory) + 1)
    axes.plot(layers, theory, color=COLOURS[one.start], linewidth=1.5, label=one.start)
    seen = [mean_of_logs([getattr(curve, name)[layer - 1] for curve in one.networks]) for layer in layers]
    axes.plot(layers, seen, ".", color=COLOURS[one.start], markersize=6, markeredgewidth=0)
