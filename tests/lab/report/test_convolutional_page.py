# The page of convolutional nets: what it says of them, architectures beside each other, parity with its margin.
from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from makers import TINY, grid, record

from affine_divergence.lab.claims import judge, parse_claims
from affine_divergence.lab.report import claim_line, write_report
from affine_divergence.lab.report._forest import claim_figure
from affine_divergence.lab.report._style import look
from affine_divergence.lab.report._sweeps import heading, sweeps
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import Summary, summarise
from affine_divergence.lab.trial import CONVOLUTIONAL, FULLY_CONNECTED, Trial
from affine_divergence.lab.tuning import plan

ARCHITECTURES = """study = "convolutions"
data = "digits"
claims = ["C6"]
[[grid]]
method = ["none", "layer-norm-position", "affine-like"]
width = 4
depth = [2, 3]
pattern = ["k3s2-k3s1", "k5s2"]
activation = ["tanh", "leaky-relu"]
batch_size = 32
learning_rate = 0.1
seed = [0, 1, 2]
epochs = 2
"""
BATCHES = """[[grid]]
method = ["none", "affine-like"]
width = 4
depth = 2
pattern = "k5s2"
activation = "tanh"
batch_size = [8, 128]
learning_rate = 0.1
seed = [0, 1, 2]
epochs = 2
"""
CELLS = """[[claim.part.cells]]
activation = ["tanh", "leaky-relu"]
depth = [2, 3]
width = [4]
pattern = ["k3s2-k3s1", "k5s2"]
batch_size = [32]
"""
PART = """[[claim.part]]
estimand = "parity"
method = "affine-like"
rivals = ["none"]
margin = 0.5
"""
SHOWN = PART.replace('"none"', '"layer-norm-position"') + "verdict = false\n"
LEADS = PART.replace('"parity"', '"lead"') + "verdict = false\n"
CLAIMS = f"""version = 2
level = 0.05
[[claim]]
id = "C6"
statement = "On a par."
{PART}{CELLS}{SHOWN}{CELLS}{LEADS}{CELLS}"""
POOLED = "mean of 8: 2/3 × 4 k3s2-k3s1/k5s2, tanh/leaky-relu, batch 32, 2 epochs"


def records(text: str = ARCHITECTURES, ahead: float = 0.1) -> list[Record]:
    # Affine-like is ahead of none by `ahead` points, and by up to 0.2 more by seed; of layer-norm-position by 20.
    def points(one: Trial) -> float:
        own = {"affine-like": ahead + 0.1 * one.seed, "layer-norm-position": -20.0}.get(one.method, 0.0)
        return 50.0 + 2.0 * one.depth + own

    return [record(one, points(one) / 100) for one in plan(grid(text), {}).missing]


def summary(text: str = ARCHITECTURES) -> Summary:
    return summarise(grid(text), records(text))


def words(page: Path) -> str:
    text = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)).replace("\N{NO-BREAK SPACE}", " ")


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("methods", [CONVOLUTIONAL, FULLY_CONNECTED])
def test_no_two_methods_of_a_model_look_alike(methods: tuple[str, ...]) -> None:
    looks = [look(method) for method in methods]
    assert len({(one["color"], one["linestyle"]) for one in looks}) == len(methods)
    assert len({one["marker"] for one in looks}) == len(methods)


def test_the_page_says_what_a_convolutional_setting_is_and_where_the_methods_stand(tmp_path: Path) -> None:
    text = words(write_report(records(), ARCHITECTURES, tmp_path, CLAIMS).page)
    assert "Convolutional networks trained by plain gradient descent" in text
    assert "A setting is convolutions × channels, kernels and strides, activation" in text
    assert "layer-norm-position and rms-norm-position the channels at each position" in text
    assert "hidden layers" not in text
    plain = words(write_report(records(TINY), TINY, tmp_path / "plain").page)
    assert "Fully-connected networks trained by plain gradient descent" in plain
    assert "A setting is hidden layers × width, activation, batch size and budget." in plain
    assert ("onvolution" in plain, "PatchNorm" in plain, "arity" in plain) == (False, False, False)


def test_a_page_of_both_kinds_of_nets_tells_them_apart(tmp_path: Path) -> None:
    block = re.sub(r"pattern = .*\n", "", BATCHES)
    text = words(write_report(records(ARCHITECTURES + block), ARCHITECTURES + block, tmp_path, CLAIMS).page)
    assert "Fully-connected and convolutional networks trained by" in text
    assert "A setting of a fully-connected net is hidden layers × width" in text
    assert "A setting of a convolutional net is convolutions × channels" in text


def test_architectures_stand_beside_each_other_by_activation() -> None:
    tanh, leaky = sweeps(summary().settings)
    assert (tanh.axis, tanh.title, leaky.title) == ("architecture", "tanh, batch 32, 2 epochs", "leaky-relu, batch 32, 2 epochs")
    assert [tanh.label(setting) for setting in tanh.settings] == ["2 × 4\nk3s2-k3s1", "2 × 4\nk5s2", "3 × 4\nk3s2-k3s1", "3 × 4\nk5s2"]
    assert [tanh.x(setting) for setting in tanh.settings] == [0.0, 1.0, 2.0, 3.0]
    assert tanh.methods == ["none", "layer-norm-position", "affine-like"]
    assert heading([tanh, leaky]) == "By architecture"


def test_a_line_along_the_depth_takes_its_settings_from_the_architectures() -> None:
    text = ARCHITECTURES.replace("depth = [2, 3]", "depth = [2, 3, 4]").replace('["tanh", "leaky-relu"]', '"tanh"')
    found = sweeps(summary(text).settings)
    assert [(sweep.axis, sweep.quantity, sweep.title) for sweep in found] == [
        ("depth", "convolutions", f"4 channels, {pattern}, tanh, batch 32, 2 epochs") for pattern in ("k3s2-k3s1", "k5s2")
    ]
    assert heading(found) == "Against width, depth and batch size"
    wide = ARCHITECTURES.replace("width = 4", "width = [4, 8]")
    assert [len(sweep.settings) for sweep in sweeps(summary(wide).settings)] == [8, 8]
    connected = (
        re.sub(r"pattern = .*\n", "", ARCHITECTURES).replace("layer-norm-position", "layer-norm").replace("width = 4", "width = [4, 8]")
    )
    assert sweeps(summary(connected).settings) == []


def test_a_method_with_one_setting_of_a_line_is_not_on_it() -> None:
    found = sweeps(summary(ARCHITECTURES + BATCHES).settings)
    (batches,) = [sweep for sweep in found if sweep.axis == "batch_size"]
    assert batches.title == "2 × 4 k5s2, tanh, 2 epochs\nrates tuned for each size"
    assert batches.methods == ["none", "affine-like"]
    assert heading(found) == "By architecture, and against batch size"


def test_figures_are_named_by_architecture_and_drawn_of_every_method(tmp_path: Path) -> None:
    text = ARCHITECTURES + BATCHES
    write_report(records(text), text, tmp_path, CLAIMS)
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"by-architecture-1", "by-batch-size-1", "claim-C6", "learning-curves-2x4-k3s2-k3s1-leaky-relu-b32-e2"} <= names
    assert not [name for name in names if name.startswith("accuracy-")]  # the overview shows them all
    shown = texts((tmp_path / "figures" / "by-architecture-1.svg").read_text())
    assert {"none", "layer-norm-position", "affine-like", "convolutions × channels, kernels and strides", "k3s2-k3s1"} <= set(shown)


def test_the_page_of_a_parity_holds_both_p_and_the_settings_in_one_table(tmp_path: Path) -> None:
    report = write_report(records(), ARCHITECTURES, tmp_path, CLAIMS)
    text = words(report.page)
    (judged,) = report.claims
    p = 0.5 - (0.3 / 0.1 * math.sqrt(3)) / (2 * math.sqrt(2 + (0.3 / 0.1 * math.sqrt(3)) ** 2))  # 0.1, 0.2, 0.3: 0.3 below the margin
    assert claim_line(judged).cells[2:7] == (
        "reproduced",
        "+0.20 [-0.05,\N{NO-BREAK SPACE}+0.45]",
        "3",
        f"{p:.4f}",
        f"{p:.4f}",
    )
    assert claim_line(judged).cells[7] == f"Weakest: affine-like against none, {POOLED}. Of 1 unit: 1 reproduced."
    assert "Test accuracy of affine-like − that of each other method, mean over the settings; claimed: within ±0.5 " in text
    assert "against difference, points [95 %] n p, within p, beyond beyond, Holm p, two-sided p, sign flips" in text
    assert f"none +0.20 [-0.05, +0.45] 3 {p:.4f} 1.0000 1.0000" in text
    assert "Test accuracy of affine-like − that of each other method; decides nothing" in text
    assert "setting against difference, points [95 %] n p, two-sided p, sign flips 2 × 4 k3s2-k3s1, tanh, batch 32, 2 epochs none" in text
    assert "For parity it is that of two one-sided tests" in text
    assert "Parity, a mean over settings that lies within ±margin" in text


def test_a_parity_that_is_contradicted_says_that_it_is_beyond_the_margin() -> None:
    (judged,) = judge(parse_claims(CLAIMS), summarise(grid(ARCHITECTURES), records(ahead=3.0)))
    cells = claim_line(judged).cells
    assert cells[2:4] == ("contradicted", "+3.10 [+2.85,\N{NO-BREAK SPACE}+3.35]")
    assert cells[7] == f"Beyond the margin: affine-like against none, {POOLED}. Of 1 unit: 1 contradicted."


def test_the_figure_of_a_parity_keeps_far_rivals_apart_and_names_settings_by_what_differs() -> None:
    (judged,) = judge(parse_claims(CLAIMS), summarise(grid(ARCHITECTURES), records()))
    figure = claim_figure(judged)
    assert figure is not None
    shown = texts(figure)
    assert f"{POOLED}: reproduced" in shown
    assert f"{POOLED}: decides nothing" in shown
    assert "affine-like against none, batch 32, 2 epochs: decides nothing" in shown
    assert {"2 × 4 k3s2-k3s1, tanh", "3 × 4 k5s2, leaky-relu"} <= set(shown)
    assert shown.count("points  (grey: the margin)") == 3  # an axis each: what decides, rivals that are only shown, settings


def test_a_setting_that_was_not_run_is_told_in_the_table_of_settings(tmp_path: Path) -> None:
    some = [one for one in records() if (one.trial.method, one.trial.pattern, one.trial.depth) != ("none", "k5s2", 3)]
    report = write_report(some, ARCHITECTURES, tmp_path, CLAIMS)
    text = words(report.page)
    assert "3 × 4 k5s2, tanh, batch 32, 2 epochs (not run) none – 0 – –" in text
    missing = "; ".join(f"none at 3 × 4 k5s2, {activation}, batch 32, 2 epochs" for activation in ("tanh", "leaky-relu"))
    assert f"{POOLED}: undecided not run: {missing}" in text
