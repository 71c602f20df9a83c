# What print shows of a diagnosis: coverage first, then the calls worst first, in text that a terminal can hold.
from __future__ import annotations

import dataclasses
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import diagnosis_maker as made
import pytest

from affine_divergence.diagnostics._columns import lines
from affine_divergence.diagnostics._records import Diagnosis, LossChange
from affine_divergence.diagnostics._sentences import GLOSSARY, GOOD, index_meaning
from affine_divergence.diagnostics._tables import Table, calls_table, corrections_table, name_of, number, rows_table, share
from affine_divergence.diagnostics._verdict import RULES, verdict


def told(diagnosis) -> str:
    """The text on one line."""
    return " ".join(str(diagnosis).split())


def cells(diagnosis, first: str) -> dict[str, list[str]]:
    """The cells under the header line that begins with `first`, by the first of them."""
    lines = str(diagnosis).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = [line.split() for line in lines[header + 2 : header + 2 + len(lines)]]
    end = next((i for i, row in enumerate(rows) if not row), len(rows))
    return {row[0]: row[1:] for row in reversed(rows[:end])}


def test_coverage_stands_before_the_verdicts_and_these_before_the_table() -> None:
    said = str(made.diagnosis())
    places = [said.index(part) for part in ("Measured: 3 modules", "Skipped: 13 modules", "Of 3 calls: 1 broken, 1 look, 1 ok", "module  ")]
    assert places == sorted(places)


def test_modules_skipped_for_one_reason_stand_on_one_line() -> None:
    lines = str(made.diagnosis()).splitlines()
    assert "  of a type that is not measured: LayerNorm blocks.*.norm (12)." in lines
    assert "  not called: Linear lost." in lines
    assert "Skipped: 13 modules; * is any number, in brackets how many they are." in lines
    assert "Skipped: 1 module." in str(made.diagnosis(coverage=(made.covered("lost", reason="not called"),))).splitlines()


def test_a_share_of_the_parameters_is_told_as_measured() -> None:
    assert "3 modules, 3 calls, which hold 62.9 % of the 4,768 parameters." in str(made.diagnosis())  # 3 · 1000 of 3000 + 12 · 64 + 1000


def test_calls_whose_gradient_never_came_are_told() -> None:
    coverage = (made.covered("fc", calls=3, fired=2), made.covered("head"))
    assert "A gradient that adds to .grad arrived for 2 of 3 calls: fc." in str(made.diagnosis(coverage=coverage))
    alike = tuple(made.covered(name, calls=1, fired=0) for name in ("a", "dropped"))
    assert "A gradient that adds to .grad arrived for 0 of 1 call each: a, dropped." in str(made.diagnosis(coverage=alike))


def test_the_calls_are_sorted_worst_first() -> None:
    names = [line.split()[0] for line in str(made.diagnosis()).splitlines() if line.startswith(("head  ", "blocks.0.fc  ", "embed  "))]
    assert names[:3] == ["head", "blocks.0.fc", "embed"]


def test_a_row_shows_its_own_numbers_to_three_digits() -> None:
    one = made.row(multiplier_p5=0.00012345, multiplier_median=12.3456, multiplier_p95=123456.0, update_ratio=math.inf)
    shown = cells(made.diagnosis(rows=(one,)), "module ")["fc"]
    assert " ".join(shown) == "ok Linear 500 (12) 0.000123 12.3 1.23e5 0.61 3.7 0.873 2.46 % 1.37 97 of 513 inf -0.842"


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "–"), (-0.0, "0"), (1e-12, "1e-12"), (-98765.0, "-9.88e4"), (0.99951, "1"), (-math.inf, "-inf")]
)
def test_numbers_are_short(value: float, said: str) -> None:
    assert number(value) == said


def test_a_share_is_a_percentage_and_one_that_is_not_defined_a_dash() -> None:
    assert [share(0.1234), share(0.0), share(math.nan)] == ["12.3 %", "0 %", "–"]


def test_the_plain_gradient_has_a_line_under_each_call_only_where_it_differs() -> None:
    apart = str(made.diagnosis())
    assert sum(line.startswith("plain gradient  ") for line in apart.splitlines()) == 3
    assert "plain gradient: what plain gradient descent would have done" in apart
    names = {field.name for field in dataclasses.fields(made.row()) if field.name.endswith("_plain")}
    row = made.row()
    same = dataclasses.replace(row, **{name: getattr(row, name.removesuffix("_plain")) * (1 + 1e-6) for name in names})
    absent = dataclasses.replace(row, **dict.fromkeys(names, math.nan))
    for one in (same, absent):
        assert not any(line.startswith("plain gradient") for line in str(made.diagnosis(rows=(one,))).splitlines())


def test_the_call_is_shown_only_where_a_module_has_several() -> None:
    assert "call" not in next(line for line in str(made.diagnosis()).splitlines() if line.startswith("module "))
    twice = made.diagnosis(rows=(made.row("fc", call=0), made.row("fc", call=1, multiplier_median=77.0)))
    lines = str(twice).splitlines()
    assert next(line for line in lines if line.startswith("module ")).split()[:2] == ["module", "call"]
    assert [line.split()[1] for line in lines if "77" in line.split()] == ["1"]


def test_the_rank_is_left_out_where_it_was_not_asked_for() -> None:
    assert "97 of 513" in str(made.diagnosis())
    without = str(made.diagnosis(rows=(made.row(rank=None, rank_limit=None),)))
    assert "rank" not in next(line for line in without.splitlines() if line.startswith("module "))


def test_every_verdict_that_is_not_ok_has_its_reason_and_equal_ones_share_a_line() -> None:
    rows = tuple(made.row(f"blocks.{i}.fc", verdict="look", reason="it is steep") for i in range(3))
    said = str(made.diagnosis(rows=(*rows, made.row("head", reason="all is well")), coverage=()))
    assert "look: blocks.*.fc (3): it is steep" in said.splitlines()
    assert "all is well" not in said


def test_forty_calls_are_shown_and_the_rest_counted() -> None:
    rows = tuple(made.row(f"layer{chr(97 + i % 26)}{i // 26}", below_zero=i / 100) for i in range(55))
    said = str(made.diagnosis(rows=rows, counterfactual=()))
    shown = [line.split()[0] for line in said.splitlines() if line.startswith("layer")]
    assert shown == [rows[i].module for i in range(54, 14, -1)]
    assert "The 40 worst of 55 calls; .to_frame() has all." in said


def test_a_long_name_keeps_its_end_and_the_root_has_one() -> None:
    long = "encoder.the_layers_of_it.self_attention_of_all.query_projection"
    said = str(made.diagnosis(rows=(made.row(long, verdict="look", reason="here"), made.row(""))))
    assert any(line.startswith("…") and "query_projection" in line for line in said.splitlines())
    assert f"look: {long}: here" in said
    assert name_of("") in said


def test_no_line_of_a_usual_transformer_is_wider_than_175_letters() -> None:
    names = [f"encoder.layer.{i}.attention.self.query" for i in range(12)]
    rows = tuple(made.row(name, type="MultiheadAttention", multiplier_p5=-1.23e-5, rows=98304) for name in names)
    counterfactual = tuple(made.counterfactual(kind, name) for name in names for kind in made.KINDS)
    assert max(map(len, str(made.diagnosis(rows=rows, counterfactual=counterfactual)).splitlines())) <= 175


def test_loss_predicted_and_realised_are_told_with_their_ratio() -> None:
    said = " ".join(str(made.diagnosis()).split())
    assert "loss 2.3026 before, 2.2526 after. Change predicted to first order -0.0541, realised -0.05, 0.924 times the predicted." in said
    assert "The step on the same batch" not in str(made.diagnosis(loss=None))


def test_the_self_check_tells_its_worst_error_and_every_failure_by_name() -> None:
    said = " ".join(str(made.diagnosis()).split())
    assert "1 of 2 parameters agree; largest relative error 0.31 (head.weight)." in said
    assert "head.weight: error 0.31, cosine 0.95: the weight is used outside the layer" in said
    assert "embed.weight: error" not in said


def test_a_check_that_agrees_by_rounding_alone_alarms_nobody() -> None:
    exact, noise = (made.check(name, error=error) for name, error in (("fc.weight", 2e-7), ("fc.bias", 0.93)))
    assert "2 of 2 parameters agree, 1 of them as far as rounding lets it (fc.bias); largest relative error of the others 2e-7" in told(
        made.diagnosis(checks=(noise, exact))
    )
    alone = told(made.diagnosis(checks=(noise,)))
    assert "1 of 1 parameter agrees, 1 of them as far as rounding lets it (fc.bias)." in alone
    assert "0.93" not in alone
    wrong = made.check("head.weight", error=0.31, ok=False, reason="another use")
    assert "2 of 3 parameters agree, 1 of them as far as rounding lets it (fc.bias); largest relative error of the others 0.31" in told(
        made.diagnosis(checks=(noise, exact, wrong))
    )


def test_a_check_after_clipping_is_told_as_one_up_to_a_factor() -> None:
    assert "up to a factor, by which clipping may have shortened it: 1 of 2 parameters agree" in told(made.diagnosis(loss=None))
    assert "up to a factor" not in told(made.diagnosis())


def test_each_correction_has_its_median_over_the_calls_and_its_step() -> None:
    found = tuple(
        made.counterfactual(kind, name, alignment_median=value)
        for kind in ("none", "sample")
        for name, value in (("a", 0.1), ("b", math.nan), ("c", 0.3))
    )
    shown = cells(made.diagnosis(counterfactual=found), "step of ")
    assert shown["none"][:4] == ["3", "1", "0", "0.2"]
    assert shown["none"][-4:] == ["0.125", "-0.05", "-0.045", "exact"]
    assert shown["actual"][0] == "3"
    assert shown["actual"][3] == "0.22"  # of 0.873, 0.22 and -0.12, the rows' own
    assert list(reversed(shown)) == ["actual", "none", "sample", "batch"]


def test_a_first_order_prediction_is_labelled_so() -> None:
    lines = str(made.diagnosis()).splitlines()
    assert all("first order, g held fixed" in line for line in lines if line.startswith(("affine-like  ", "norm-like  ")))


def test_a_correction_without_numbers_says_why_and_is_not_in_the_median() -> None:
    refused = made.counterfactual("sample", "b", alignment_median=math.nan, reason="its rows are one-hot")
    said = made.diagnosis(counterfactual=(made.counterfactual("sample", "a"), refused))
    assert "sample has no numbers for b: its rows are one-hot." in str(said)
    assert cells(said, "step of ")["sample"][:3] == ["1", "of", "2"]


def test_what_was_assumed_and_what_good_looks_like_close_the_text() -> None:
    said = " ".join(str(made.diagnosis(about={"model": "Net", "weight_decay": [0.0, 0.1], "plain": True, "inputs": {"fc": 7}})).split())
    assert "model: Net; weight decay: 0, 0.1; plain: yes" in said
    assert "inputs:" not in said
    assert said.index("a layer's own parameters") < said.index("Good is a step") < said.index("Benign:")


def test_a_rate_that_nobody_gave_is_told_as_assumed_and_what_hangs_on_it() -> None:
    about = {"model": "Net", "lr": [1.0], "lr assumed": True, "plain": True}
    assert "lr: 1 (assumed, nobody gave one; the change of the loss is that of this rate); plain" in told(made.diagnosis(about=about))
    assert "lr: 1; plain" in told(made.diagnosis(about=about | {"lr assumed": False}))


def test_names_that_are_not_printable_are_shown_escaped() -> None:
    odd = "fc\x1b[31m\n\u202e\ud800\x85é"
    said = str(made.called(odd))
    assert said.count(r"fc\x1b[31m\n\u202e\ud800\x85é") > 12
    assert [letter for letter in said if not (letter.isprintable() or letter == "\n")] == []
    assert "31m\n" not in said
    assert said == str(made.called(r"fc\x1b[31m\n\u202e\ud800\x85é"))


def test_a_diagnosis_of_nothing_says_so() -> None:
    nothing = made.diagnosis(rows=(), coverage=(), checks=(), loss=None, counterfactual=(), samples=())
    assert "No call of any layer was measured." in str(nothing)
    assert nothing.steps
    assert "under a correction" not in str(nothing)


def test_text_needs_nothing_beyond_the_standard_library() -> None:
    extra = "{'torch', 'polars', 'matplotlib', 'jinja2'}"
    code = f"import sys, diagnosis_maker as made; str(made.diagnosis()); print(sorted({extra} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(made.__file__).parent)
    assert done.stdout.strip() == "[]"


def test_a_loss_that_is_another_at_a_second_forward_is_told_and_blamed_on_no_step() -> None:
    noisy = told(made.diagnosis(loss=LossChange(before=2.0, after=2.5, predicted=-3.0, realised=0.5, repeated=2.3)))
    assert "A second forward from the same beginning gave 2.3" in noisy
    assert "too long" not in noisy
    same = made.diagnosis(loss=LossChange(before=2.0, after=1.5, predicted=-0.6, realised=-0.5, repeated=2.0 + 1e-6))
    assert "A second forward" not in told(same)


def test_a_step_that_raises_the_loss_that_it_was_to_lower_is_said_to_be_too_long() -> None:
    too_long = made.diagnosis(loss=LossChange(before=2.0, after=2.5, predicted=-3.0, realised=0.5))
    assert "The step is too long" in told(too_long)
    assert "The step is too long" not in told(made.diagnosis(loss=LossChange(before=2.0, after=1.5, predicted=-3.0, realised=-0.5)))
    by_rounding = LossChange(before=2.0, after=2.0000002, predicted=-1e-7, realised=2e-7)
    assert "The step is too long" not in told(made.diagnosis(loss=by_rounding))


def test_modules_of_nothing_but_a_number_are_named_each() -> None:
    rows = tuple(made.row(name, verdict="look", reason="a reason") for name in ("1", "3", "blocks.0.fc", "blocks.1.fc"))
    assert "look: 1, 3, blocks.*.fc (2): a reason" in str(made.diagnosis(rows=rows))


def test_a_twin_that_differs_by_the_rounding_of_what_is_larger_is_none() -> None:
    same = {"multiplier_p5": -400.0, "multiplier_p95": 900.0, "update_ratio": 0.01}
    same |= {f"{name}_plain": value for name, value in same.items()}
    same |= {"multiplier_median": 0.0101, "multiplier_median_plain": 0.0100}
    rounded = made.row(alignment_median=0.00102276, alignment_median_plain=0.00102005, **same)
    other = made.row(alignment_median=0.02, alignment_median_plain=0.01, **same)
    assert "plain gradient  " not in str(made.diagnosis(rows=(rounded,)))
    assert "plain gradient  " in str(made.diagnosis(rows=(other,)))


def usual() -> Diagnosis:
    names = [f"{half}.layers.{i}.self_attn.q_proj" for half in ("encoder", "decoder") for i in range(3)]
    twins = {field.name: math.nan for field in dataclasses.fields(made.row()) if field.name.endswith("_plain")}
    rows = tuple(made.row(name, call=call, type="MultiheadAttention", multiplier_p5=-1.23e-5, **twins) for name in names for call in (0, 1))
    corrected = tuple(made.counterfactual(kind, row.module, call=row.call) for row in rows for kind in made.KINDS)
    return made.diagnosis(rows=rows, counterfactual=corrected)


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_on_a_terminal_no_line_is_wider_than_it(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    print(usual())
    found = terminal.getvalue().splitlines()
    assert width - 20 <= max(map(len, found)) <= width


def test_where_there_is_no_terminal_tables_are_whole_and_paragraphs_have_140_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for out in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", out)
        said = str(usual()).splitlines()
        assert max(map(len, said)) > 140
        paragraphs = said[next(i for i, line in enumerate(said) if line.startswith("model: ")) :]
    assert 120 < max(map(len, paragraphs)) <= 140


def blocks(found: list[str]) -> list[list[str]]:
    return [block.split("\n") for block in "\n".join(found).split("\n\n")]


@pytest.mark.parametrize("width", [44, 60, 80, 100])
@pytest.mark.parametrize("of", [rows_table, calls_table, corrections_table])
def test_a_table_in_blocks_holds_every_cell_once_behind_what_names_its_row(of, width: int) -> None:
    table = of(usual())
    whole = blocks(lines(table))
    parts = blocks(lines(table, width))
    assert len(whole) == 1 < len(parts)

    def words(found: list[list[str]], keys: int) -> list[str]:
        headers = [next(i for i, line in enumerate(block) if line.startswith("─")) - 1 for block in found]
        cells = [re.split(r" {2,}", line) for block, i in zip(found, headers, strict=True) for line in (block[i], *block[i + 2 :])]
        return sorted(cell for line in cells for cell in line[keys:])

    keys = table.keys
    assert {block[-1].split()[0] for block in parts} == {whole[0][-1].split()[0]}
    assert words(parts, keys) == words(whole, keys)


@pytest.mark.parametrize("width", [44, 80, 100, 1000])
def test_a_title_stands_whole_over_its_columns_in_each_block_that_has_some(width: int) -> None:
    table = calls_table(usual())
    assert table is not None
    for titles, headers, *_ in blocks(lines(table, width)):
        for title in re.finditer(r"─* ?(\w[\w ]*\w) ?─*", titles):
            under = headers[title.start() : title.end() + 1].split()  # the space after a title may be stripped
            assert under
            assert set(under) <= {*made.KINDS}
        assert {title.strip("─ ") for title in re.split(r" {2,}", titles.strip())} <= {"spread of the multiplier", "alignment", "uphill"}


def test_a_title_has_room_over_one_narrow_column() -> None:
    table = Table(("module", "p5"), (("fc", "1"),), groups=(("", 1), ("a long title", 1)))
    assert lines(table)[0] == " " * 8 + " a long title"
    assert lines(table)[1].split() == ["module", "p5"]


def test_names_are_cut_no_shorter_than_they_can_be_told_apart() -> None:
    names = ("t.encoder.layers.0.self_attn.q_proj", "t.decoder.layers.0.self_attn.q_proj", "head")
    said = str(made.diagnosis(rows=tuple(map(made.row, names)), counterfactual=tuple(made.counterfactual("none", name) for name in names)))
    shown = [line.split()[0] for line in said.splitlines() if "q_proj" in line]
    assert {*shown} == {"…ncoder.layers.0.self_attn.q_proj", "…ecoder.layers.0.self_attn.q_proj"}
    alone = str(made.diagnosis(rows=(made.row(names[0]),), counterfactual=()))
    assert "…rs.0.self_attn.q_proj  " in alone


def test_the_text_says_what_each_column_of_its_table_is() -> None:
    said = told(made.diagnosis())
    columns = {*rows_table(made.diagnosis()).headers} - {"module", "verdict", "type", "p5", "median", "p95"} | {"multiplier"}
    assert {name for name, *_ in GLOSSARY} == columns
    for name, meaning, ideal in GLOSSARY:
        assert f"{name}: {meaning}{f'; ideal: {ideal}' if ideal else ''}." in said
    assert said.index(GOOD) < said.index("What the columns say:")


@pytest.mark.parametrize(
    ("changed", "rate", "words"),
    [
        ({"rows": 0}, 0.1, "none of whose rows has a gradient"),
        ({}, 0.0, "a learning rate of 0"),
        ({"update_ratio": 0.0, "efficiency": math.nan}, 0.1, "a step that leaves the parameters or all rows as they were"),
    ],
)
def test_the_rules_name_what_is_looked_at_beside_the_measures(changed: dict[str, float], rate: float, words: str) -> None:
    assert verdict(vars(made.row()) | changed, rate, -0.5)[0] == "look"
    assert words in RULES
    assert words in told(made.diagnosis())


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("PatchNormConv2d", "image, group, then position"),
        ("ConvTranspose1d", "image, group, then position"),
        ("Conv1D", "input before the last"),  # linear, of transformers
        ("AffineLikeLinear", "input before the last"),
        ("MultiheadAttention", "input before the last"),
        ("Embedding", "axes of the layer's input, counted"),
        ("Stem", "axes of the layer's rows"),
    ],
)
def test_what_an_index_counts_is_said_by_the_type(kind: str, axes: str) -> None:
    assert axes in index_meaning(kind)
    assert index_meaning(kind).endswith("counted from 0")


def test_of_corrections_the_forty_worst_calls_are_shown_and_the_rest_counted() -> None:
    rows = tuple(made.row(f"layer{i}x") for i in range(55))
    corrected = tuple(made.counterfactual("none", row.module) for row in rows)
    assert 'The 40 worst of 55 calls; .to_frame("counterfactual") has all.' in str(made.diagnosis(rows=rows, counterfactual=corrected))
    assert '.to_frame("counterfactual")' not in str(made.diagnosis())
