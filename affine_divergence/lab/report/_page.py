# The report: one self-contained page, its figures and the table of trials beside it.
from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from affine_divergence.lab.claims import Judged, Line, Unit, claims_digest, judge, parse_claims
from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import to_frame
from affine_divergence.lab.grid import grid_of
from affine_divergence.lab.report._claims import (
    CELL_HEADERS,
    CLAIM_HEADERS,
    SHOWN_HEADERS,
    SLOPE_HEADERS,
    cell_lines,
    claim_line,
    flag_lines,
    headers_of,
    shown_lines,
    title_of,
    unit_line,
)
from affine_divergence.lab.report._figures import figures
from affine_divergence.lab.report._forest import claim_figure
from affine_divergence.lab.report._overview import overview
from affine_divergence.lab.report._run import TIMING_HEADERS, how_it_was_run, timings
from affine_divergence.lab.report._sweeps import heading, sweeps
from affine_divergence.lab.report._tables import HEADERS, headline, lines, matrix
from affine_divergence.lab.report._tendencies import POOLED_HEADERS, TENDENCY_HEADERS, glances, pooled_lines, protocol_of, tendency_line
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import Setting, Summary, summarise
from affine_divergence.lab.trial import FOOF_DECAY, FOOF_REFRESH, GRADIENT_ONLY

FEW = 3  # settings that stand open on the page and in the terminal; more are told in one table first
CAPTIONS = {
    "accuracy": "Test accuracy at the chosen learning rates",
    "learning-rates": "Validation accuracy against the learning rate",
    "learning-curves": "Learning curves at the chosen learning rates",
}


class Report(NamedTuple):
    """The page that was written, and what it says."""

    page: Path
    summary: Summary
    claims: tuple[Judged, ...]  # none where the study kept no claims or its grid file names none


def write_report(records: Sequence[Record], grid_text: str, out: Path, claims_text: str | None = None) -> Report:
    """Write report.html, figures/*.svg and trials.parquet into a folder; the claims' text is the one that the study kept, if any."""
    import jinja2

    grid = grid_of(grid_text, "the study's grid", (record.trial for record in records))
    claims = parse_claims(claims_text, "the study's claims") if claims_text is not None else None
    summary = summarise(grid, records)
    if not summary.settings:
        raise BadInputError(f"there is nothing to report yet: none of the trials of {grid.study} is tested, {summary.missing} are missing")
    judged = judge(claims, summary) if claims else ()
    drawn: dict[str, str] = {}
    found = sweeps(summary.settings)
    kinds = {setting.cell.pattern is not None for setting in summary.settings}
    optimisers = dict.fromkeys(setting.cell.optimizer for setting in summary.settings)
    starts = [start for start in dict.fromkeys(setting.cell.start for setting in summary.settings) if start != "torch"]
    in_overview = [setting for sweep in found for setting in sweep.settings]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("affine_divergence.lab", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("template.html").render(
        grid=grid,
        grid_text=grid_text,
        claims=[_claim(one, drawn) for one in judged],
        glances=glances(judged) if any(one.protocol for one in judged) else None,
        protocols=list(dict.fromkeys(one.protocol for one in judged if one.protocol)),
        predictions=any(one.claim.id.startswith("P") for one in judged),  # not the paper's own
        claims_text=claims_text if judged else None,
        claims_digest=claims_digest(claims_text) if claims_text is not None and judged else None,
        level=claims.level if claims else None,
        parity=any(part.estimand == "parity" for one in judged for part in one.claim.part),
        networks=_networks(kinds),
        optimisers=" and by ".join({"sgd": "plain gradient descent", "adamw": "AdamW"}[name] for name in optimisers),
        starts=starts,
        fully_connected=False in kinds,
        convolutional=True in kinds,
        gradient_only=any(row.cell.method in GRADIENT_ONLY for setting in summary.settings for row in setting.rows),
        foof=(FOOF_DECAY, FOOF_REFRESH),
        headers={
            "claims": CLAIM_HEADERS,
            "tendencies": TENDENCY_HEADERS,
            "pooled": POOLED_HEADERS,
            "shown": SHOWN_HEADERS,
            "cells": CELL_HEADERS,
            "slopes": SLOPE_HEADERS,
            "setting": HEADERS,
            "timings": TIMING_HEADERS,
        },
        overview_heading=heading(found),
        overview=[_picture(name, svg, caption, drawn) for name, (caption, svg) in overview(found).items()],
        matrix=matrix(summary.settings),
        few=len(summary.settings) <= FEW,
        settings=[_setting(setting, setting in in_overview, drawn) for setting in summary.settings],
        missing=summary.missing,
        run=how_it_was_run(records),
        timings=timings(records),
    )
    page = out / "report.html"
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        if page.exists():  # this report takes the place of one that was there
            for figure in (out / "figures").glob("*.svg"):
                figure.unlink()
        for name, svg in drawn.items():
            (out / "figures" / f"{name}.svg").write_text(svg, encoding="utf-8")
        page.write_text(html, encoding="utf-8")
        to_frame(records, grid.study, grid_text, claims_text).write_parquet(out / "trials.parquet")
    except OSError as error:
        raise BadInputError(f"cannot write the report to {out}: {error.strerror or error}; name another folder with --out") from error
    return Report(page, summary, judged)


def _claim(judged: Judged, drawn: dict[str, str]) -> Mapping[str, Any]:
    figure = claim_figure(judged)
    firsts = {unit.line: unit for unit in reversed(judged.units)}  # the methods' own slopes are those of a line: told once
    under = f", {protocol_of(judged)}" if judged.protocol else ""
    name = f"claim-{judged.claim.id}" + (f"-{judged.protocol.name}" if judged.protocol else "")
    caption = f"{judged.claim.id}{under}: every comparison with its 95 % interval"
    return {
        "line": claim_line(judged) if not judged.protocol else None,
        "tendency": tendency_line(judged) if judged.protocol else None,
        "pooled": [(title_of(part), pooled_lines(tendency)) for part, tendency in judged.tendencies],
        "parts": [_part([unit for unit in judged.units if unit.part is part], firsts) for part in judged.claim.part],
        "cells": cell_lines(judged),
        "flags": flag_lines(judged),
        "picture": _picture(name, figure, caption, drawn) if figure else None,
    }


def _part(units: Sequence[Unit], firsts: Mapping[Line, Unit]) -> Mapping[str, Any]:
    part = units[0].part
    return {
        "title": title_of(part),
        "headers": headers_of(part),
        "shown": shown_lines(units) if part.claims_nothing else [],  # a table for all units, that claim nothing
        "units": [] if part.claims_nothing else [unit_line(unit, slopes=firsts[unit.line] is unit) for unit in units],
    }


def _networks(kinds: Set[bool]) -> str:
    if len(kinds) > 1:
        return "Fully-connected and convolutional networks"
    return "Convolutional networks" if True in kinds else "Fully-connected networks"


def _setting(setting: Setting, in_overview: bool, drawn: dict[str, str]) -> Mapping[str, Any]:
    rows = lines(setting)
    pictures = []
    for name, svg in figures(setting, in_overview=in_overview).items():
        caption = next(text for prefix, text in CAPTIONS.items() if name.startswith(prefix))
        pictures.append(_picture(name, svg, caption, drawn))
    flags = [flag for row in rows for flag in row.flags]
    return {"name": setting.name, "headline": headline(setting), "rows": rows, "flags": flags, "pictures": pictures}


def _picture(name: str, svg: str, caption: str, drawn: dict[str, str]) -> Mapping[str, str]:
    drawn[name] = svg
    return {"caption": caption, "source": base64.b64encode(svg.encode()).decode()}
