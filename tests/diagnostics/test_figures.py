# The figures of a diagnosis: what is drawn where, and what cannot be drawn is said.
from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING

import diagnosis_maker as made
import numpy as np
import pytest

from affine_divergence.diagnostics._axes import tick
from affine_divergence.diagnostics._figures import alignment_figure, multiplier_figure
from affine_divergence.diagnostics._scatter import drawable, extreme, index_of, scatter_figure
from affine_divergence.diagnostics._style import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP, PLAIN, ALONE = "#0072B2", "#E69F00", "#666666"


def axes_of(figure: Figure) -> Axes:
    return figure.axes[0]


def points(axes: Axes, colour: str, marker: str) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_color() == colour and line.get_marker() == marker]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def bars(axes: Axes, colour: str) -> list[tuple[float, float]]:
    return [tuple(line.get_xdata()) for line in axes.lines if line.get_color() == colour and len(line.get_xdata()) == 2]


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def words(figure: Figure) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_the_calls_stand_in_their_order_from_the_top() -> None:
    axes = axes_of(made.diagnosis().plot())
    assert names(axes) == ["embed", "blocks.0.fc", "head"]
    assert sorted(axes.get_yticks(), reverse=True) == list(axes.get_yticks())


def test_a_bar_goes_from_the_5th_to_the_95th_percentile_and_a_point_is_the_median() -> None:
    axes = axes_of(multiplier_figure(made.diagnosis(rows=(made.row(),))))
    assert axes.get_xscale() == "log"
    assert bars(axes, STEP) == [(3.0, 21.5)]
    assert bars(axes, PLAIN) == [(3.0 * 1.01, 21.5 * 1.01)]
    assert bars(axes, ALONE) == [(2.5, 9.25)]
    assert [x for x, _ in points(axes, STEP, "o")] == [8.25]
    assert [x for x, _ in points(axes, PLAIN, "D")] == [8.25 * 1.01]
    assert [x for x, _ in points(axes, ALONE, "|")] == [5.75]


def test_what_lies_at_zero_or_below_is_an_arrow_at_the_left_edge_that_is_explained() -> None:
    below = {"multiplier_p5": -3.0, "multiplier_median": -2.0, "multiplier_p95": -1.0}
    rows = (made.row("a", multiplier_p5=-4.0, multiplier_median=-0.5), made.row("b", **below))
    axes = axes_of(figure := multiplier_figure(made.diagnosis(rows=rows)))
    left = axes.get_xlim()[0]
    assert [x for x, _ in points(axes, STEP, "<")] == [left, left]
    assert points(axes, STEP, "o") == []
    assert bars(axes, STEP) == [(left, 21.5)]
    assert any("reaches zero or below" in text for text in words(figure))
    assert not any("reaches zero or below" in text for text in words(multiplier_figure(made.diagnosis(rows=(made.row(),)))))


def test_the_reference_lines_are_named() -> None:
    figure = multiplier_figure(made.diagnosis())
    assert any(list(line.get_xdata()) == [1.0, 1.0] for line in axes_of(figure).lines)
    assert points(axes_of(figure), "#CC79A7", "|") == [(1001.0, 0.0), (513.0, -1.0), (65.0, -2.0)]  # d + 1 of each
    said = words(figure)
    assert "1: a corrected layer’s ideal" in said
    assert "d + 1: inputs of unit variance" in said
    assert "d + 1: inputs of unit variance" not in words(multiplier_figure(made.diagnosis(about={})))


def test_a_call_without_numbers_keeps_its_place() -> None:
    nothing = {name: math.nan for name in vars(made.row()) if name.startswith("multiplier")}
    axes = axes_of(multiplier_figure(made.diagnosis(rows=(made.row("a", **nothing), made.row("b")))))
    assert names(axes) == ["a", "b"]
    assert len(points(axes, STEP, "o")) == len(points(axes, PLAIN, "D")) == 1


def test_of_many_calls_the_sixty_worst_are_drawn_in_their_order_and_the_title_says_so() -> None:
    rows = tuple(made.row(f"layers.{i}.fc", below_zero=(i * 37 % 101) / 101) for i in range(101))
    figure = multiplier_figure(made.diagnosis(rows=rows))
    assert names(axes_of(figure)) == [row.module for row in rows if row.below_zero * 101 > 40.5]
    assert any("the 60 worst of 101 calls" in text for text in words(figure))
    assert figure.get_figheight() < 25


def test_several_calls_of_a_module_are_told_apart() -> None:
    axes = axes_of(multiplier_figure(made.diagnosis(rows=(made.row("fc", call=0), made.row("fc", call=1)))))
    assert names(axes) == ["fc, call 0", "fc, call 1"]


def test_a_name_is_no_formula() -> None:
    figure = multiplier_figure(made.diagnosis(rows=(made.row("price_$x^{$"),)))
    assert "price_$x^{$" in svg(figure)


def test_the_heat_map_holds_each_alignment_at_its_step_and_nothing_where_none_was_measured() -> None:
    later = made.diagnosis(step=200, rows=(made.row("head", alignment_median=0.5), made.row("new", alignment_median=-1.0)))
    axes = axes_of(alignment_figure([made.diagnosis(step=100), later]))
    values = np.ma.filled(axes.images[0].get_array(), math.nan)
    np.testing.assert_array_equal(values, [[0.873, math.nan], [0.22, math.nan], [-0.12, 0.5], [math.nan, -1.0]])
    assert names(axes) == ["embed", "blocks.0.fc", "head", "new"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["100", "200"]
    assert axes.images[0].get_clim() == (-1.0, 1.0)


def test_a_heat_map_of_a_thousand_steps_has_ten_of_them_named() -> None:
    axes = axes_of(alignment_figure([made.diagnosis(step=10 * i) for i in range(1000)]))
    marked = [label.get_text() for label in axes.get_xticklabels()]
    assert len(marked) == 10
    assert (marked[0], marked[-1]) == ("0", "9990")
    assert axes.images[0].get_array().shape == (3, 1000)


def test_a_heat_map_of_many_calls_keeps_those_whose_alignment_was_lowest() -> None:
    rows = tuple(made.row(f"fc{i}", alignment_median=(i * 37 % 101) / 101) for i in range(101))
    figure = alignment_figure([made.diagnosis(rows=rows)])
    assert names(axes_of(figure)) == [row.module for row in rows if row.alignment_median * 101 < 59.5]
    assert any("The 60 of 101 calls" in text for text in words(figure))


def test_a_heat_map_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one diagnosis, got none"):
        alignment_figure([])


def test_the_scatter_shows_the_rows_with_a_gradient_and_counts_the_rest() -> None:
    samples = made.samples("head", count=60)
    figure = scatter_figure(samples)
    offsets = np.asarray(axes_of(figure).collections[0].get_offsets())
    np.testing.assert_array_equal(offsets, list(zip(samples.multiplier[1:], samples.alignment[1:], strict=True)))
    assert any("head: 60 of 120 rows, 1 without a gradient left out" in text for text in words(figure))


def test_the_scatter_is_logarithmic_where_it_can_be() -> None:
    assert axes_of(scatter_figure(made.samples())).get_xscale() == "log"
    below = made.samples(multiplier=tuple(float(i - 10) for i in range(60)), alignment=(0.5,) * 60)
    assert axes_of(scatter_figure(below)).get_xscale() == "symlog"


def test_the_extreme_rows_are_those_of_lowest_alignment_and_farthest_multiplier() -> None:
    multiplier = [10.0] * 60
    alignment = [0.9 + 0.001 * i for i in range(60)]
    multiplier[7], multiplier[8] = 1e4, 1e-3  # as far above as below, almost: 1e-3 is farther in ratio
    alignment[30], alignment[31] = -0.9, -0.5
    samples = made.samples(multiplier=tuple(multiplier), alignment=tuple(alignment), gradient=(1.0,) * 60)
    assert extreme(samples)[:4] == [30, 8, 31, 7]
    assert len(extreme(samples)) == 10


def test_an_index_counts_along_the_axes_of_the_input() -> None:
    samples = made.samples(axes=(4, 3, 5), index=tuple(range(60)))
    expected = np.stack(np.unravel_index(np.arange(60), (4, 3, 5)), 1)
    assert [index_of(samples, i) for i in range(60)] == [f"({', '.join(map(str, row))})" for row in expected]
    assert index_of(made.samples(axes=(120,)), 59) == "118"


def test_extreme_rows_are_named_and_no_name_lies_on_another() -> None:
    samples = made.samples(multiplier=(5.0,) * 59 + (80.0,), alignment=(0.5,) * 59 + (-0.2,), gradient=(1.0,) * 60)
    figure = scatter_figure(samples)
    figure.draw_without_rendering()
    shown = [text for text in axes_of(figure).texts if text.get_text()]
    assert "(59, 0)" in [text.get_text() for text in shown]
    assert 2 <= len(shown) <= 10  # most of them are one point
    from matplotlib.text import Text

    boxes = [Text.get_window_extent(text) for text in shown]  # without its arrow
    assert not any(one.overlaps(two) for i, one in enumerate(boxes) for two in boxes[:i])


@pytest.mark.parametrize(("gradient", "multiplier"), [(0.0, math.nan), (1.0, 0.0), (1.0, 3.0), (1.0, -3.0)])
def test_rows_that_are_all_masked_or_all_alike_can_be_drawn(gradient: float, multiplier: float) -> None:
    samples = made.samples(multiplier=(multiplier,) * 60, alignment=(0.5,) * 60, gradient=(gradient,) * 60)
    assert len(drawable(samples)) == 60 * (gradient > 0)
    scatter_figure(samples).draw_without_rendering()


def test_an_axis_within_a_decade_has_numbers() -> None:
    samples = made.samples(multiplier=tuple(2.1 + 0.1 * i for i in range(60)), alignment=(0.5,) * 60, gradient=(1.0,) * 60)
    figure = scatter_figure(samples)
    figure.draw_without_rendering()
    low, high = axes_of(figure).get_xlim()
    assert [label.get_text() for label in axes_of(figure).get_xticklabels() if low <= label.get_position()[0] <= high] == ["2", "5"]


def test_figures_are_not_kept_by_pyplot() -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    made.diagnosis().plot(), scatter_figure(made.samples()), alignment_figure([made.diagnosis()])
    assert plt.get_fignums() == before


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"a figure needs matplotlib, .* pip install 'affine-divergence\[diagnosis\]'"):
        made.diagnosis().plot()


def test_names_that_are_not_printable_are_drawn_escaped() -> None:
    figure = made.called("fc\x1b[31m\n\ud800é").plot()
    assert names(axes_of(figure)) == [r"fc\x1b[31m\n\ud800é"]
    svg(figure)


def spread_out(seed: int, count: int = 400) -> made.Samples:
    """Rows uphill and downhill over some decades, as a transformer has them."""
    random = np.random.default_rng(seed)
    multiplier = np.sign(random.normal(size=count)) * 10.0 ** random.normal(3.2, 0.6, count)
    alignment = np.clip(np.sign(multiplier) * random.beta(2, 3, count), -1, 1)
    values = {"multiplier": tuple(multiplier.tolist()), "alignment": tuple(alignment.tolist()), "gradient": (1.0,) * count}
    return made.samples(axes=(count // 20, 20), index=tuple(range(count)), total=count, **values)


@pytest.mark.parametrize("seed", range(4))
def test_numbers_on_a_symmetric_scale_do_not_touch(seed: int) -> None:
    axes = axes_of(figure := scatter_figure(spread_out(seed)))
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert len(boxes) >= 4
    assert all(right.x0 - left.x1 >= 4 * figure.dpi / 72 for left, right in itertools.pairwise(sorted(boxes, key=lambda box: box.x0)))
    assert "0" in [label.get_text() for label in axes.get_xticklabels()]


@pytest.mark.parametrize("seed", range(4))
def test_the_names_of_rows_lie_on_no_point_and_stand_apart(seed: int) -> None:
    from matplotlib.text import Text

    axes = axes_of(figure := scatter_figure(spread_out(seed)))
    figure.draw_without_rendering()
    points = axes.transData.transform(np.asarray(axes.collections[0].get_offsets()))
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) >= 5
    assert [box for box in boxes if box.count_contains(points)] == []
    assert not any(one.padded(figure.dpi / 72).overlaps(two) for i, one in enumerate(boxes) for two in boxes[:i])


@pytest.mark.parametrize(("value", "said"), [(0.0, "0"), (-1e4, "−10000"), (1e6, "1e6"), (-1e7, "−1e7"), (1e-5, "1e−5"), (1e10, "1e10")])
def test_the_numbers_of_an_axis_are_short(value: float, said: str) -> None:
    assert tick(value) == said


def test_names_beside_an_axis_are_cut_no_shorter_than_they_can_be_told_apart() -> None:
    long = [f"model.{half}.{'layers_' * 20}fc" for half in ("encoder", "decoder")]
    one = made.diagnosis(rows=tuple(map(made.row, long)))
    for figure in (multiplier_figure(one), alignment_figure([one])):
        figure.draw_without_rendering()
        assert [name[:3] for name in names(axes_of(figure))] == ["…nc", "…ec"]
        assert axes_of(figure).get_position().width * figure.get_figwidth() > 5
    assert names(axes_of(multiplier_figure(made.diagnosis(rows=(made.row(long[0]),))))) == [f"…{long[0][-35:]}"]


@pytest.mark.parametrize("multiplier", [(-3.0,), (-5.0, -50.0, -70.0), (-1e-12, 2e-12), (-1e30, 1e-3, 1e30)])
def test_a_symmetric_scale_has_numbers_wherever_its_rows_lie(multiplier: tuple[float, ...]) -> None:
    count = len(multiplier)
    values = {"multiplier": multiplier, "alignment": (0.5,) * count, "gradient": (1.0,) * count}
    axes = axes_of(figure := scatter_figure(made.samples(axes=(count,), index=tuple(range(count)), **values)))
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    assert axes.get_xscale() == "symlog"
    assert any(low <= tick <= high for tick in axes.get_xticks())
    assert low < min(multiplier)
    assert (max(multiplier) < 0) == (high < 0)
