# The tables of a diagnosis with their cells as text: what the terminal and the page both show.
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from affine_divergence.diagnostics._records import Counterfactual, Diagnosis, Row, Step
from affine_divergence.diagnostics._visible import visible

NOTHING = "–"
PLAIN = "plain gradient"
KINDS = ("actual", "none", "affine-like", "norm-like", "sample", "batch")
_SAME = 1e-3  # relative: closer than the three digits that are shown


@dataclass(frozen=True)
class Table:
    """Cells under headers; the columns named in `left` hold words, the rest numbers; the first `keys` say what a row is of."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...] = ("module", "type", "verdict", "step of", "basis")
    groups: tuple[tuple[str, int], ...] = ()  # a line over the headers: a title and how many columns it stands over
    kinds: tuple[str, ...] = field(default=())  # of each row: its verdict, or PLAIN
    keys: int = 1


def rows_table(diagnosis: Diagnosis, most: int | None = None) -> Table:
    """The calls, worst first; under each one the same of the plain gradient, unless the optimiser's step is that everywhere."""
    shown = diagnosis.worst()[:most]
    several, twins = any(row.call for row in diagnosis.rows), twinned(diagnosis)
    ranked = any(row.rank is not None for row in diagnosis.rows)
    headers = (
        "module",
        *(["call"] if several else []),
        *("verdict", "type", "rows", "p5", "median", "p95", "spread", "G p95/p5", "alignment", "uphill", "interference"),
        *(["rank"] if ranked else []),
        *("δW/W", "efficiency"),
    )
    rows, kinds = [], []
    for row in shown:
        rows.append(_row(row, several, ranked))
        kinds.append(str(row.verdict))
        if twins:
            rows.append(_twin(row, several, ranked))
            kinds.append(PLAIN)
    groups = (("", 4 + several), ("multiplier", 4), ("", len(headers) - 8 - several))
    return Table(headers, tuple(rows), groups=groups, kinds=tuple(kinds), keys=1 + several)


def twinned(diagnosis: Diagnosis) -> bool:
    """Whether there are numbers of the plain gradient, and not those of the optimiser's step everywhere."""
    return any(_differs(row) for row in diagnosis.rows)


def corrections_table(diagnosis: Diagnosis) -> Table | None:
    """A line a kind: medians over the calls, and what a step of one length does to the loss. None where no call was measured."""
    if not (diagnosis.counterfactual or (diagnosis.steps and diagnosis.rows)):
        return None
    steps = {step.kind: step for step in diagnosis.steps}
    named = dict.fromkeys([*steps, *(one.kind for one in diagnosis.counterfactual)])
    kinds = [*(kind for kind in KINDS if kind in named), *(kind for kind in named if kind not in KINDS)]
    measures = ("multiplier", "spread", "alignment", "uphill", "interference", "efficiency")
    headers = ("step of", "calls", *measures, "length", "predicted", "realised", "basis")
    groups = (("", 2), ("median over the calls", 6), ("step", 1), ("change of the loss", 2), ("", 1))
    return Table(headers, tuple(_correction(kind, diagnosis, steps.get(kind)) for kind in kinds), groups=groups)


def calls_table(diagnosis: Diagnosis, most: int | None = None) -> Table | None:
    """Each call under each kind, worst first: the spread of the multiplier, the alignment, the share uphill. None without any."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in diagnosis.counterfactual)]
    if not kinds:
        return None
    found = {(one.module, one.call, one.kind): one for one in diagnosis.counterfactual}
    several = any(one.call for one in diagnosis.counterfactual)
    places = [(row.module, row.call) for row in diagnosis.worst()]
    places += [place for place in dict.fromkeys((one.module, one.call) for one in diagnosis.counterfactual) if place not in set(places)]
    rows = []
    for module, call in places[:most]:
        ones = [found.get((module, call, kind)) for kind in kinds]
        spread = [number(one.multiplier_cv) if one else NOTHING for one in ones]
        alignment = [number(one.alignment_median) if one else NOTHING for one in ones]
        uphill = [share(one.below_zero) if one else NOTHING for one in ones]
        rows.append((name_of(module), *([str(call)] if several else []), *spread, *alignment, *uphill))
    width = len(kinds)
    groups = (("", 1 + several), ("spread of the multiplier", width), ("alignment", width), ("uphill", width))
    return Table(("module", *(["call"] if several else []), *kinds * 3), tuple(rows), groups=groups, keys=1 + several)


def name_of(module: str) -> str:
    """The module's name as it can be shown; the root has an empty one."""
    return visible(module) or "(the model)"


def cut(texts: Sequence[str], least: int) -> list[str]:
    """The ends of long texts, which tell more of a module's name than its beginning: of `least` letters, or as many as tell them apart.

    >>> cut(["net.encoder.0.fc", "net.decoder.0.fc", "head"], 6)
    ['…ncoder.0.fc', '…ecoder.0.fc', 'head']
    """
    different, longest = set(texts), max(map(len, texts), default=0)
    limit = next((n for n in range(least, longest) if len({_end(text, n) for text in different}) == len(different)), longest)
    return [_end(text, limit) for text in texts]


def number(value: float) -> str:
    """Three digits: 0.123, 1.23e5."""
    if math.isnan(value):
        return NOTHING
    digits, e, power = f"{value + 0.0:.3g}".partition("e")  # + 0.0: no -0
    return f"{digits}e{int(power)}" if e else digits


def share(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{number(100 * value)} %"


def of_limit(rank: int | None, limit: int | None) -> str:
    return NOTHING if rank is None else f"{rank} of {NOTHING if limit is None else limit}"


def median(values: Iterable[float]) -> float:
    """Of those that are numbers; NaN without any."""
    there = [value for value in values if not math.isnan(value)]
    return statistics.median(there) if there else math.nan


def apart(row: Row) -> float:
    """How far apart the multipliers are that rows alone would have, p95/p5 of G_ii."""
    if row.self_term_p5:
        return row.self_term_p95 / row.self_term_p5
    return math.inf if row.self_term_p95 > 0 else math.nan


def _end(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"…{text[len(text) - letters + 1 :]}"


def _row(row: Row, several: bool, ranked: bool) -> tuple[str, ...]:
    return (
        name_of(row.module),
        *([str(row.call)] if several else []),
        row.verdict,
        row.type,
        f"{row.rows} ({row.masked})" if row.masked else str(row.rows),
        number(row.multiplier_p5),
        number(row.multiplier_median),
        number(row.multiplier_p95),
        number(row.multiplier_cv),
        number(apart(row)),
        number(row.alignment_median),
        share(row.below_zero),
        number(row.interference),
        *([of_limit(row.rank, row.rank_limit)] if ranked else []),
        number(row.update_ratio),
        number(row.efficiency),
    )


def _twin(row: Row, several: bool, ranked: bool) -> tuple[str, ...]:
    return (
        PLAIN,
        *([""] if several else []),
        *("", "", ""),
        number(row.multiplier_p5_plain),
        number(row.multiplier_median_plain),
        number(row.multiplier_p95_plain),
        number(row.multiplier_cv_plain),
        "",
        number(row.alignment_median_plain),
        share(row.below_zero_plain),
        "",
        *([""] if ranked else []),
        number(row.update_ratio_plain),
        number(row.efficiency_plain),
    )


def _differs(row: Row) -> bool:
    # Multipliers near 0, and cosines, are differences of what is larger: by that they are told apart from their twins.
    size = max(abs(row.multiplier_p5), abs(row.multiplier_p95))
    pairs = (
        (row.multiplier_p5, row.multiplier_p5_plain, size),
        (row.multiplier_median, row.multiplier_median_plain, size),
        (row.multiplier_p95, row.multiplier_p95_plain, size),
        (row.alignment_median, row.alignment_median_plain, 1.0),
        (row.update_ratio, row.update_ratio_plain, 0.0),
    )
    return any(
        not math.isnan(plain) and not math.isclose(actual, plain, rel_tol=_SAME, abs_tol=_SAME * of if math.isfinite(of) else 0.0)
        for actual, plain, of in pairs
    )


def _correction(kind: str, diagnosis: Diagnosis, step: Step | None) -> tuple[str, ...]:
    # What the optimiser did is measured as it was: the rows themselves are its line.
    there: Sequence[Counterfactual | Row] = [one for one in diagnosis.counterfactual if one.kind == kind]
    basis = ", ".join(dict.fromkeys(one.basis for one in diagnosis.counterfactual if one.kind == kind and not one.reason))
    if kind == "actual":
        there, basis = diagnosis.rows, "as it was"
    numbered = [one for one in there if isinstance(one, Row) or not one.reason]
    return (
        kind,
        str(len(numbered)) if len(numbered) == len(there) else f"{len(numbered)} of {len(there)}",
        number(median(one.multiplier_median for one in numbered)),
        number(median(one.multiplier_cv for one in numbered)),
        number(median(one.alignment_median for one in numbered)),
        share(median(one.below_zero for one in numbered)),
        number(median(one.interference for one in numbered)),
        number(median(one.efficiency for one in numbered)),
        *([number(step.norm), number(step.predicted), number(step.realised)] if step else [NOTHING] * 3),
        basis or NOTHING,
    )
