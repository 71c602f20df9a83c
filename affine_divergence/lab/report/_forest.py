# The figure of a claim: every comparison with its interval, unit by unit.
from __future__ import annotations

from affine_divergence.lab.claims import Judged
from affine_divergence.lab.report._claims import unit_of
from affine_divergence.lab.report._style import COLOURS, STYLE, svg

ROW = 0.2  # inches


def claim_figure(judged: Judged) -> str | None:
    """Differences in points with their 95 % intervals; filled where the unit decides, the margin dashed. None without any."""
    units = [unit for unit in judged.units if any(one.evidence for one in unit.comparisons)]
    if not units:
        return None
    import matplotlib.pyplot as plt

    methods = {unit.part.method for unit in units}
    kinds = list(dict.fromkeys(unit_of(unit) for unit in units))
    heights = [sum(1 + len(unit.comparisons) for unit in units if unit_of(unit) == kind) for kind in kinds]
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            len(kinds),
            1,
            figsize=(9.4, ROW * sum(heights) + 0.7 * len(kinds)),
            height_ratios=heights,
            layout="constrained",
            squeeze=False,
        )
        for axes, kind in zip(grid[:, 0], kinds, strict=True):
            places, labels, y = [], [], 0.0
            for unit in (unit for unit in units if unit_of(unit) == kind):
                whose = f"{unit.part.method}, " if len(methods) > 1 else ""
                title = f"{whose}{unit.line.name}: {unit.verdict or 'decides nothing'}"
                axes.text(0.005, y, title, fontsize=9, fontweight="bold", va="center", transform=axes.get_yaxis_transform())
                for one in unit.comparisons:
                    y += 1.0
                    places.append(y)
                    labels.append(one.against)
                    if one.evidence:
                        interval, colour = one.evidence.interval, COLOURS.get(one.against, "#0072B2")
                        axes.plot([interval.low, interval.high], [y, y], color=colour, linewidth=1.6)
                        face = colour if unit.verdict else "white"
                        axes.plot([interval.mean], [y], "o", color=colour, markerfacecolor=face, markersize=5)
                        axes.plot([-unit.part.margin, unit.part.margin], [y, y], "|", color="#999999", markersize=8)
                y += 1.0
            axes.axvline(0.0, color="#444444", linewidth=0.8)
            axes.set_yticks(places, labels, fontsize=9)
            axes.set_ylim(y - 0.4, -0.7)
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(f"points{kind}  (grey: the margin)")
        return svg(figure)
