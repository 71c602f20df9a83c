# Verdicts on the page and as text: the table first, then every comparison, the flags, the cells.
from __future__ import annotations

import re
from pathlib import Path

import pytest
from makers import TINY, grid, record

from affine_divergence.lab.claims import claims_digest, judge, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import from_frame, read_parquet
from affine_divergence.lab.report import CLAIM_HEADERS, claim_line, write_report
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.tuning import plan

ONE_RATE = 'claims = ["C1"]\n' + TINY.replace("[0.03, 0.3]", "[0.3]")
CLAIMS = """version = 1
level = 0.05
[[claim]]
id = "C1"
statement = "Affine-like is ahead of none & <nothing>."
[[claim.part]]
estimand = "lead"
method = "affine-like"
rivals = ["none"]
direction = "greater"
margin = 0.5
[[claim.part.cells]]
activation = ["tanh"]
depth = [2]
width = [8]
batch_size = [32]
"""
ELSEWHERE = CLAIMS.replace("width = [8]", "width = [64]")
BOTH = CLAIMS.replace("width = [8]", "width = [8, 64]")


def records(lead: float = 0.02, text: str = ONE_RATE) -> list[Record]:
    # Leads of 2, 2.1 and 2.2 points by seed where `lead` is 0.02.
    return [
        record(one, 0.5 + 0.01 * one.seed + (lead * (1 + 0.05 * one.seed) if one.method == "affine-like" else 0.0))
        for one in plan(grid(text), {}).missing
    ]


def line(claims: str, found: list[Record]) -> tuple[str, ...]:
    (judged,) = judge(parse_claims(claims), summarise(grid(ONE_RATE), found))
    return claim_line(judged).cells


def words(page: Path) -> str:
    text = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)).replace("\N{NO-BREAK SPACE}", " ")


def test_a_claims_line_holds_verdict_effect_n_p_and_why() -> None:
    cells = dict(zip(CLAIM_HEADERS, line(CLAIMS, records()), strict=True))
    assert cells["verdict"] == "reproduced"
    assert cells["effect, points"].replace("\N{NO-BREAK SPACE}", " ") == "+2.10 [+1.85, +2.35]"
    assert (cells["n"], cells["p"], cells["p, Holm"]) == ("3", "0.0004", "0.0004")
    assert cells["why"] == "Weakest: affine-like against none at 2 × 8, tanh, batch 32, 2 epochs. Of 1 unit: 1 reproduced."


def test_the_p_of_a_contradicted_claim_is_that_of_the_opposite() -> None:
    cells = line(CLAIMS, records(-0.02))
    assert cells[2:] == (
        "contradicted",
        "-2.10 [-2.35,\N{NO-BREAK SPACE}-1.85]",
        "3",
        "0.0004",
        "0.0004",
        "The opposite is found: affine-like against none at 2 × 8, tanh, batch 32, 2 epochs. Of 1 unit: 1 contradicted.",
    )


def test_a_claim_about_what_was_not_run_says_so() -> None:
    assert line(ELSEWHERE, records())[2:] == ("undecided", "–", "–", "–", "–", "Of 1 unit: 1 undecided (not run).")
    # Holm over both units: the one that was run keeps its p times two, and the other counts as 1.
    assert line(BOTH, records())[2:3] + line(BOTH, records())[5:] == (
        "undecided",
        "0.0004",
        "0.0008",
        "Weakest: affine-like against none at 2 × 8, tanh, batch 32, 2 epochs. Of 2 units: 1 reproduced, 1 undecided (not run).",
    )


def test_the_verdicts_stand_before_everything_else_and_the_hash_of_the_claims_is_named(tmp_path: Path) -> None:
    page = write_report(records(), ONE_RATE, tmp_path, CLAIMS).page
    text = words(page)
    assert text.index("Did the paper’s claims hold?") < text.index(
        "C1 Affine-like is ahead of none &amp; &lt;nothing&gt;. reproduced +2.10"
    )
    assert text.index("reproduced +2.10") < text.index("2 × 8, tanh, batch 32, 2 epochs: affine-like 53.10 %")
    assert "none +2.10 [+1.85, +2.35] 3 0.0004 0.9996 0.9996 0.0008 0.2500" in text
    assert claims_digest(CLAIMS) in text
    assert "<nothing>" not in page.read_text()
    assert (tmp_path / "figures" / "claim-C1.svg").is_file()


def test_a_study_without_claims_has_no_claims_section(tmp_path: Path) -> None:
    report = write_report(records(), ONE_RATE, tmp_path)
    text = words(report.page)
    assert ("claims hold?" in text, "verdict" in text.lower(), "The claims and their rule" in text) == (False, False, False)
    assert report.claims == ()


def test_only_claims_that_the_grid_file_names_are_judged(tmp_path: Path) -> None:
    unnamed = ONE_RATE.replace('claims = ["C1"]', "")
    report = write_report(records(text=unnamed), unnamed, tmp_path, CLAIMS)
    assert report.claims == ()
    assert "hold?" not in report.page.read_text()
    assert from_frame(read_parquet(tmp_path / "trials.parquet"))[2] == CLAIMS
    with pytest.raises(BadInputError, match="names the claims C9, the known ones are C1"):
        write_report(records(), ONE_RATE.replace("C1", "C9"), tmp_path, CLAIMS)


def test_the_page_with_claims_is_made_again_from_its_table_byte_for_byte(tmp_path: Path) -> None:
    page = write_report(records(), ONE_RATE, tmp_path / "first", CLAIMS).page
    text, back, claims = from_frame(read_parquet(tmp_path / "first" / "trials.parquet"))
    again = write_report(back, text, tmp_path / "second", claims).page
    assert again.read_bytes() == page.read_bytes()
    for figure in (tmp_path / "first" / "figures").iterdir():
        assert figure.read_bytes() == (tmp_path / "second" / "figures" / figure.name).read_bytes()


def test_flags_of_a_claims_cells_are_told_with_wilsons_interval(tmp_path: Path) -> None:
    some = records()[:-1]
    at = next(i for i, r in enumerate(some) if r.trial.method == "none")
    some[at] = record(some[at].trial, 0.1, status="diverged")
    text = words(write_report(some, ONE_RATE, tmp_path, CLAIMS).page)
    where = "none at 2 × 8, tanh, batch 32, 2 epochs"
    said = "a loss that is not finite, 1 that ended no better than chance (rate 33.33 %, 95 % interval 6.15 to 79.23 %)"
    assert f"{where}: 1 of 3 runs diverged and count as chance: 0 with {said}" in text
    assert "affine-like at 2 × 8, tanh, batch 32, 2 epochs: 2 of the 3 seeds that the grid asks for are there" in text
    assert "1/3 [6, 79] %" in text
    assert "2 of 3" in text
    assert "its verdicts are not final" in text


def test_a_stored_text_that_is_no_claims_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="the study's claims are not a TOML file"):
        write_report(records(), ONE_RATE, tmp_path / "out", "no claims")
    assert not (tmp_path / "out").exists()
