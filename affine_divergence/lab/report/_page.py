# The report: one self-contained page, its figures and the table of trials beside it.
from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from affine_divergence.lab.errors import BadInputError
from affine_divergence.lab.frame import PROVENANCE, to_frame
from affine_divergence.lab.grid import parse_grid
from affine_divergence.lab.report._figures import figures
from affine_divergence.lab.report._tables import HEADERS, headline, lines
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import Summary, summarise

CAPTIONS = {
    "accuracy": "Test accuracy at the chosen learning rates",
    "learning-rates": "Validation accuracy against the learning rate",
    "learning-curves": "Learning curves at the chosen learning rates",
}


def write_report(records: Sequence[Record], grid_text: str, out: Path) -> tuple[Path, Summary]:
    """Write report.html, figures/*.svg and trials.parquet into a folder; the page's path and what it says."""
    import jinja2

    grid = parse_grid(grid_text, "the study's grid")
    summary = summarise(grid, records)
    if not summary.settings:
        raise BadInputError(f"there is nothing to report yet: none of the trials of {grid.study} is tested, {summary.missing} are missing")
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        settings = []
        for setting in summary.settings:
            pictures = []
            for name, svg in figures(setting).items():
                (out / "figures" / f"{name}.svg").write_text(svg, encoding="utf-8")
                caption = next(text for prefix, text in CAPTIONS.items() if name.startswith(prefix))
                pictures.append({"caption": caption, "source": base64.b64encode(svg.encode()).decode()})
            rows = lines(setting)
            flags = [flag for row in rows for flag in row.flags]
            settings.append({"name": setting.name, "headline": headline(setting), "rows": rows, "flags": flags, "pictures": pictures})
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("affine_divergence.lab", "report"), autoescape=True, undefined=jinja2.StrictUndefined
        )
        page = out / "report.html"
        page.write_text(
            environment.get_template("template.html").render(
                grid=grid, grid_text=grid_text, headers=HEADERS, settings=settings, missing=summary.missing, run=_run(records)
            ),
            encoding="utf-8",
        )
        to_frame(records, grid.study, grid_text).write_parquet(out / "trials.parquet")
    except OSError as error:
        raise BadInputError(f"cannot write the report to {out}: {error.strerror or error}; name another folder with --out") from error
    return page, summary


def _run(records: Sequence[Record]) -> dict[str, str]:
    # How it was run; several values of one thing are all shown, with the number of their trials.
    status = Counter(record.outcome.status for record in records)
    run = {
        "trials": ", ".join(f"{count} {name}" for name, count in status.items()),
        "training time": f"{sum(record.outcome.cpu_seconds or 0.0 for record in records) / 60:.1f} CPU minutes",
        "stacks": f"of {_range([record.outcome.stack_size for record in records if record.outcome.stack_size])} trials",
    }
    for name in PROVENANCE:
        values = Counter(str(record.provenance.get(name)) for record in records)
        label = name.replace("_", " ")
        run[label] = "; ".join(value if len(values) == 1 else f"{value} ({count} trials)" for value, count in values.most_common())
    return run


def _range(values: Sequence[int]) -> str:
    if not values:
        return "no"
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
