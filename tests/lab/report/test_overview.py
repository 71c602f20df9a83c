# The overview of many settings, and figures that stay small without saying less.
from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from makers import TINY, grid, record

from affine_divergence.lab.report import matrix, write_report
from affine_divergence.lab.report._style import compact
from affine_divergence.lab.report._sweeps import sweeps
from affine_divergence.lab.stages import scores
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.tuning import plan

WIDE = TINY.replace("[8]", "[8, 16, 32, 64]").replace("[0.03, 0.3]", "[0.3]")
BLOCK = """[[grid]]
method = ["none", "affine-like"]
width = 8
depth = 2
activation = "tanh"
seed = [0, 1]
"""
KEPT = f"""study = "kept"
data = "digits"
{BLOCK}epochs = 2
batch_size = [8, 32, 128]
learning_rate = [0.01, 0.1, 1.0]
{BLOCK}epochs = 2
batch_size = [8, 128]
rate_from_batch_size = 32
{BLOCK}steps = 5
batch_size = [8, 32, 128]
learning_rate = [0.01, 0.1, 1.0]
[tuning]
seeds = [10]
"""


def played(text: str) -> list[Record]:
    done: list[Record] = []
    while missing := plan(grid(text), scores(done)).missing:
        for one in missing:
            best = {8: 0.01, 32: 0.1, 128: 1.0}.get(one.batch_size, 0.3)
            curve = {} if one.epochs else {"loss_curve": [1.0], "accuracy_curve": [0.5]}
            done.append(record(one, (0.6 if one.learning_rate == best else 0.5) + 0.01 * one.seed % 0.1, **curve))
    return done


def test_a_line_of_settings_is_a_sweep_and_two_are_not() -> None:
    (sweep,) = sweeps(summarise(grid(WIDE), played(WIDE)).settings)
    assert (sweep.axis, [setting.cell.width for setting in sweep.settings]) == ("width", [8, 16, 32, 64])
    assert sweep.title == "2 layers, tanh, batch 32, 2 epochs"
    two = WIDE.replace(", 32, 64]", "]")
    assert sweeps(summarise(grid(two), played(two)).settings) == []


def test_sweeps_of_a_kept_rate_are_apart_and_hold_the_batch_size_whose_rate_is_kept() -> None:
    found = sweeps(summarise(grid(KEPT), played(KEPT)).settings)
    assert [(s.axis, [one.cell.batch_size for one in s.settings], [one.rate_from for one in s.settings]) for s in found] == [
        ("batch_size", [8, 32, 128], [None, None, None]),
        ("batch_size", [8, 32, 128], [32, None, 32]),
        ("batch_size", [8, 32, 128], [None, None, None]),
    ]
    assert [s.title.split("\n")[1] for s in found] == ["rates tuned for each size", "at the rate of batch 32", "rates tuned for each size"]


def test_figures_are_drawn_where_they_say_what_nothing_else_says(tmp_path: Path) -> None:
    write_report(played(KEPT), KEPT, tmp_path)
    names = sorted(path.stem for path in (tmp_path / "figures").iterdir())
    assert names == sorted(
        ["by-batch-size-1", "by-batch-size-2"]  # the accuracies of every setting, so that none has a figure of them
        + [f"learning-rates-2x8-tanh-b{b}-{budget}" for b in (8, 32, 128) for budget in ("e2", "s5")]  # a kept rate was not tried
        + [f"learning-curves-2x8-tanh-b{b}-e2" for b in (8, 32, 128)]  # a curve needs two points
        + [f"learning-curves-2x8-tanh-b{b}-e2-rate-of-b32" for b in (8, 128)]
    )
    for figure in (tmp_path / "figures").iterdir():
        text = figure.read_text()
        ET.fromstring(text)
        assert {"#000000", "#0072b2"} <= set(re.findall(r"stroke: (#\w+)", text.lower())) | {"#000000"}, figure.name
        assert {"none", "affine-like"} <= set(re.findall(r">([^<>]+)</text>", text)), figure.name


def test_many_settings_are_told_in_one_table_first_and_stay_folded(tmp_path: Path) -> None:
    report = write_report(played(WIDE), WIDE, tmp_path)
    methods, rows = matrix(report.summary.settings)
    assert methods == ["none", "affine-like"]
    assert rows[0] == ["2 × 8, tanh, batch 32, 2 epochs", "3", "51.00 ± 2.48", "51.00 ± 2.48"]
    page = report.page.read_text()
    assert page.index("All settings") < page.index("<details><summary>2 × 8, tanh")
    assert page.count("<details><summary>2 × ") == 4


def test_a_compact_figure_keeps_its_shapes_texts_and_colours() -> None:
    figure = """<?xml version="1.0"?><!DOCTYPE svg PUBLIC "a" "b"><svg xmlns="http://www.w3.org/2000/svg">
 <defs><style type="text/css">*{stroke-linecap: butt}</style></defs>
 <!-- 0.123456 -->
 <g id="line_1"> <path d="M 1.23456 2
L 3 4.98765" id="m1" style="stroke: #0072b2"/> </g>
 <g><use href="#m1" x="0.5" style="stroke: #0072b2"/></g>
 <text style="fill: #000" x="1">rate 0.0012345 of 2</text>
</svg>"""
    assert compact(figure) == (
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><defs><style type="text/css">*{stroke-linecap: butt}'
        '.c0{stroke: #0072b2}.c1{fill: #000}</style></defs><path d="M 1.23 2 L 3 4.99" id="m1" class="c0"/>'
        '<use href="#m1" x="0.5" class="c0"/><text class="c1" x="1">rate 0.0012345 of 2</text></svg>\n'
    )
