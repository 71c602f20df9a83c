# The figures of one setting.
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from affine_divergence.lab.report._style import STYLE, colour_of, line_look, look, svg
from affine_divergence.lab.statistics import mean_interval
from affine_divergence.lab.summary import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def accuracy_figure(setting: Setting) -> str:
    """Test accuracy of each method: every seed, the mean and its 95 % interval."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.4, 0.45 * len(setting.rows) + 1.0), layout="constrained")
        for place, row in enumerate(reversed(setting.rows)):
            colour = colour_of(row.cell.name)
            values = [100 * value for value in row.tests().values()]
            axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.3, markersize=5, markeredgewidth=0)
            interval = row.accuracy.scaled(100.0)
            if interval.n > 1:
                axes.plot([interval.low, interval.high], [place, place], color=colour, linewidth=2)
            axes.plot([interval.mean], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axes.set_yticks(range(len(setting.rows)), [row.cell.name for row in reversed(setting.rows)])
        axes.set_ylim(-0.6, len(setting.rows) - 0.4)
        axes.set_xlabel("test accuracy, %  (dots: seeds; bar: mean and 95 % interval)")
        return svg(figure)


def learning_rate_figure(setting: Setting) -> str:
    """Validation accuracy against the learning rate, as tried, at the chosen damping where there is one; the chosen rate is ringed."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.4, 3.8), layout="constrained")
        for row in setting.rows:
            by_rate: dict[float, list[float]] = defaultdict(list)
            for record in setting.tried:
                own = record.trial.cell.name == row.cell.name and record.trial.damping == row.choice.damping
                if own and record.outcome.validation_accuracy is not None:
                    by_rate[record.trial.learning_rate].append(100 * record.outcome.validation_accuracy)
            rates = sorted(by_rate)
            means = [sum(by_rate[rate]) / len(by_rate[rate]) for rate in rates]
            axes.plot(rates, means, **look(row.cell.name), markersize=5, linewidth=1.5, label=row.cell.name)
            chosen = row.choice.learning_rate
            if chosen in by_rate:
                place = means[rates.index(chosen)]
                axes.plot([chosen], [place], "o", color=colour_of(row.cell.name), markersize=12, fillstyle="none")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("learning rate  (ringed: chosen)")
        axes.set_ylabel("validation accuracy, %")
        figure.legend(loc="outside right upper")
        return svg(figure)


def learning_curves_figure(setting: Setting) -> str:
    """Training loss and validation accuracy by epoch at the chosen rates, means over seeds with 95 % bands."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.8), layout="constrained")
        for row in setting.rows:
            _curve(left, row.cell.name, [record.outcome.loss_curve for record in row.records], 1.0)
            _curve(right, row.cell.name, [record.outcome.accuracy_curve for record in row.records], 100.0)
        for axes, label in ((left, "training loss"), (right, "validation accuracy, %")):
            axes.set_xlabel("epoch" if setting.cell.epochs else "epoch begun")
            axes.set_ylabel(label)
            axes.xaxis.get_major_locator().set_params(integer=True)
        low, high = right.get_ylim()
        right.set_ylim(max(low, 0.0), min(high, 102.0))  # a band of few seeds may reach beyond what an accuracy can be
        figure.legend(*left.get_legend_handles_labels(), loc="outside right upper")
        return svg(figure)


def figures(setting: Setting, *, in_overview: bool) -> dict[str, str]:
    """The setting's figures by file name, without the ending: those that say what no other figure and no table says.

    Accuracies that an overview shows have no figure of their own, kept learning rates were not tried, a curve needs two points.
    """
    found = {}
    if not in_overview:
        found[f"accuracy-{setting.slug}"] = accuracy_figure(setting)
    if setting.tried:
        found[f"learning-rates-{setting.slug}"] = learning_rate_figure(setting)
    if any(len(record.outcome.loss_curve) > 1 for row in setting.rows for record in row.records):
        found[f"learning-curves-{setting.slug}"] = learning_curves_figure(setting)
    return found


def _curve(axes: Axes, method: str, curves: Sequence[Sequence[float]], scale: float) -> None:
    points = [mean_interval([scale * value for value in column]) for column in zip(*curves, strict=True)]
    epochs = range(1, len(points) + 1)
    axes.plot(epochs, [p.mean for p in points], **line_look(method), linewidth=1.5, label=method)
    if curves and len(curves) > 1:
        axes.fill_between(epochs, [p.low for p in points], [p.high for p in points], color=colour_of(method), alpha=0.15, linewidth=0)
