# One page of a diagnosis, or of those of a whole training, that opens offline.
from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from affine_divergence.diagnostics._extra import needed_for
from affine_divergence.diagnostics._figures import alignment_figure, multiplier_figure
from affine_divergence.diagnostics._records import VERDICTS, Diagnosis, Samples
from affine_divergence.diagnostics._scatter import extreme, index_of, scatter_figure
from affine_divergence.diagnostics._sentences import (
    BENIGN,
    CORRECTIONS,
    GLOSSARY,
    GOOD,
    SCOPE,
    about_items,
    check_lines,
    coverage_lines,
    headline,
    index_meaning,
    loss_line,
    notes,
    reasons,
    refusals,
)
from affine_divergence.diagnostics._style import svg
from affine_divergence.diagnostics._tables import PLAIN, Table, calls_table, corrections_table, name_of, number, rows_table, twinned
from affine_divergence.diagnostics._verdict import RULES
from affine_divergence.diagnostics._visible import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MULTIPLIERS = "Multiplier of the ideal update by layer, in the order of the calls. Bold: a verdict of look (amber) or broken (red)"
ALIGNMENTS = "Median alignment by layer and step: 1 moves each row against its own gradient, below 0 moves it uphill"
ROWS = "Rows of the worst layer of those whose rows were kept; extreme ones are named by index: {}"


def write_page(diagnoses: Sequence[Diagnosis], path: str | os.PathLike[str]) -> None:
    """Write the page: the last diagnosis in full, and where there are several the alignment of all."""
    with needed_for("a page"):
        import jinja2

    if not diagnoses:
        raise ValueError(f"there is no diagnosis to write to {path}; give at least one")
    diagnoses = [shown(one) for one in diagnoses]
    last = diagnoses[-1]
    samples = worst_samples(last)
    index = index_meaning(_type_of(last, samples)) if samples else ""
    counts = Counter(row.verdict for row in last.rows)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("affine_divergence", "diagnostics"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    html = environment.get_template("template.html").render(
        model=str(last.about.get("model", "a model")),
        step=last.step,
        steps=[one.step for one in diagnoses],
        coverage=coverage_lines(last),
        headline=headline(last),
        counts=[(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]],
        rows=rows_table(last),
        plain=PLAIN if twinned(last) else "",
        notes=notes(last),
        reasons=reasons(last.worst()),
        multipliers=_picture(multiplier_figure(last), MULTIPLIERS) if last.rows else None,
        alignments=_picture(alignment_figure(diagnoses), ALIGNMENTS) if len(diagnoses) > 1 else None,
        samples=_picture(scatter_figure(samples), ROWS.format(index)) if samples else None,
        extreme=_extreme_table(samples, index) if samples else None,
        corrections=corrections_table(last),
        said_of_corrections=CORRECTIONS,
        calls=calls_table(last),
        refusals=refusals(last),
        loss=loss_line(last),
        checks=check_lines(last),
        about=about_items(last),
        scope=SCOPE,
        good=GOOD,
        benign=BENIGN,
        rules=RULES,
        glossary=GLOSSARY,
    )
    Path(path).write_text(html, encoding="utf-8")


def worst_samples(diagnosis: Diagnosis) -> Samples | None:
    """Those of the worst call that has any."""
    found = {(one.module, one.call): one for one in diagnosis.samples}
    return next((found[row.module, row.call] for row in diagnosis.worst() if (row.module, row.call) in found), None)


def _type_of(diagnosis: Diagnosis, samples: Samples) -> str:
    return next(row.type for row in diagnosis.rows if (row.module, row.call) == (samples.module, samples.call))


def _extreme_table(samples: Samples, index: str) -> Table:
    headers = ("row", "multiplier", "alignment", "‖gradient‖")
    rows = tuple(
        (index_of(samples, i), number(samples.multiplier[i]), number(samples.alignment[i]), number(samples.gradient[i]))
        for i in extreme(samples)
    )
    return Table(headers, rows, left=("row",), groups=((f"{name_of(samples.module)}, call {samples.call}; row: {index}", 4),))


def _picture(figure: Figure, caption: str) -> Mapping[str, Any]:
    return {"caption": caption, "source": base64.b64encode(svg(figure).encode()).decode()}
