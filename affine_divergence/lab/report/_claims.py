# The verdicts as text: what the page and the terminal both show.
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from affine_divergence.lab.claims import Comparison, Judged, Member, Part, Slope, Unit
from affine_divergence.lab.report._tables import chosen_rate, diverged, flags_of, p_value, percent
from affine_divergence.lab.statistics import Interval

CLAIM_HEADERS = ("claim", "statement", "verdict", "effect, points", "n", "p", "p, Holm", "why")
COMPARISON_HEADERS = ("against", "difference, points [95 %]", "n", "p", "p, opposite", "opposite, Holm", "p, two-sided", "p, sign flips")
PARITY_HEADERS = ("against", "difference, points [95 %]", "n", "p, within", "p, beyond", "beyond, Holm", "p, two-sided", "p, sign flips")
SHOWN_HEADERS = ("setting", "against", "difference, points [95 %]", "n", "p, two-sided", "p, sign flips")
CELL_HEADERS = ("setting", "method", "learning rate", "n", "test accuracy, %", "95 % interval", "diverged")
SLOPE_HEADERS = ("method", "points per doubling of the batch", "95 % interval", "n", "curvature [95 %]")
UNITS = {"trend-of-lead": {"width": " per doubling", "depth": " per layer"}}


@dataclass(frozen=True)
class ClaimLine:
    """A claim's line of the first table, its cells under CLAIM_HEADERS."""

    verdict: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class UnitLine:
    """A unit: its name, its verdict with the reason, its comparisons under COMPARISON_HEADERS, slopes under SLOPE_HEADERS."""

    name: str
    verdict: str
    reason: str
    comparisons: tuple[tuple[str, ...], ...]
    slopes: tuple[tuple[str, ...], ...]


def claim_line(judged: Judged) -> ClaimLine:
    """The claim's verdict with the comparison on which it hangs, and why."""
    unit, comparison = telling(judged)
    effect, n, p, adjusted = "–", "–", None, None
    if unit and comparison and comparison.evidence:
        effect, n = signed(comparison.evidence.interval) + per_of(unit.part), str(comparison.evidence.n)
        against = judged.verdict == "contradicted"
        p, adjusted = (comparison.opposite_p, comparison.adjusted_opposite_p) if against else (comparison.p, unit.adjusted_p)
    cells = (judged.claim.id, judged.claim.statement, judged.verdict, effect, n, p_value(p), p_value(adjusted), why(judged))
    return ClaimLine(judged.verdict, cells)


def telling(judged: Judged) -> tuple[Unit | None, Comparison | None]:
    """The comparison on which the verdict hangs: that which contradicts the claim most clearly, else the weakest."""
    pairs = [(unit, one) for unit in judged.deciding for one in unit.comparisons if one.evidence]
    clear = [(unit, one) for unit, one in pairs if not unit.obstacles] or pairs
    if not clear:
        return None, None
    if judged.verdict == "contradicted":
        return min(clear, key=lambda pair: (pair[1].adjusted_opposite_p or 0.0, pair[1].opposite_p or 0.0))
    return max(clear, key=lambda pair: pair[1].p or 0.0)


def why(judged: Judged) -> str:
    """One line: the comparison on which the verdict hangs, and how many units say what."""
    units = judged.deciding
    tally = _tally(units)
    unit, comparison = telling(judged)
    if unit is None or comparison is None:
        return tally
    at = f"{unit.part.method} against {comparison.against}{', ' if unit.line.pooled else ' at '}{unit.line.name}"
    if judged.verdict == "contradicted":
        return f"{'Beyond the margin' if unit.part.estimand == 'parity' else 'The opposite is found'}: {at}. {tally}"
    if judged.verdict == "undecided":
        return f"Weakest: {at}{_seeds(unit)}. {tally}"
    return f"Weakest: {at}. {tally}"


def unit_line(unit: Unit, *, slopes: bool = True) -> UnitLine:
    """A unit as text, with the slopes of the methods themselves or without."""
    if unit.verdict is None:
        verdict, reason = "shown only", ""
    else:
        verdict, reason = unit.verdict, f"largest p {p_value(unit.p)}, Holm {p_value(unit.adjusted_p)}"
    if unit.standing:
        verdict = unit.standing
    if unit.obstacles:
        reason = "; ".join(f"{obstacle.kind}: {obstacle.detail}" for obstacle in unit.obstacles)
    elif unit.verdict == "contradicted":
        least = min(one.adjusted_opposite_p for one in unit.comparisons if one.adjusted_opposite_p is not None)
        opposite = "beyond the margin" if unit.part.estimand == "parity" else "of the opposite"
        reason = f"smallest p {opposite}, Holm {p_value(least)}"
    else:
        reason += _seeds(unit)
    return UnitLine(
        unit.line.name + {"width": ", along width", "depth": ", along depth"}.get(unit.part.along or "", ""),
        verdict,
        reason,
        tuple(_comparison_cells(unit, one) for one in unit.comparisons),
        tuple(_slope_cells(one) for one in unit.slopes if slopes),
    )


def shown_lines(units: Sequence[Unit]) -> list[tuple[str, ...]]:
    """Units that claim nothing, all in one table under SHOWN_HEADERS."""
    lines = []
    for unit in units:
        why_not = "; ".join(obstacle.kind for obstacle in unit.obstacles)
        name = f"{unit.line.name} ({why_not})" if why_not else unit.line.name
        lines += [(name, *cells[:3], *cells[6:]) for one in unit.comparisons if (cells := _comparison_cells(unit, one))]
    return lines


def headers_of(part: Part) -> tuple[str, ...]:
    """Those of its units' comparisons."""
    return PARITY_HEADERS if part.estimand == "parity" else COMPARISON_HEADERS


def title_of(part: Part) -> str:
    """What a part compares."""
    what = {
        "lead": f"test accuracy of {part.method} − that of each other method",
        "above-chance": f"test accuracy of {part.method} − chance ({part.chance or 0.0:g} %) − {part.margin:g} points",
        "trend-of-lead": f"slope of the lead of {part.method} over the best other method along {part.along}",
        "batch-slope": f"slope of {part.method} along the batch size − that of each other method",
        "interior-signal": f"test accuracy of {part.method} at its best signal between the ends − that at each end",
        "parity": f"test accuracy of {part.method} − that of each other method, mean over the settings",
    }[part.estimand]
    sign = ">" if part.direction == "greater" else "<"
    margin = "" if part.estimand == "above-chance" else f", margin {part.margin:g}"
    claimed = "" if part.claims_nothing else f"; claimed: {sign} 0{margin}"
    if part.estimand == "parity":
        claimed = f"; claimed: within ±{part.margin:g}"
    return f"{what}{claimed}{'' if part.verdict else '; decides nothing'}"


def cell_lines(judged: Judged) -> list[tuple[str, ...]]:
    """The cells that a claim needs, each once, under CELL_HEADERS."""
    return [_cell(member) for member in _members(judged)]


def flag_lines(judged: Judged) -> list[str]:
    """What a reader should know of the claim's cells beside their numbers."""
    return [
        f"{member.method} at {member.place.name}: {flag}"
        for member in _members(judged)
        for flag in (flags_of(member.row) if member.row else ())
    ]


def per_of(part: Part) -> str:
    """What the points of a part are counted per."""
    if part.estimand == "batch-slope":
        return " per doubling"
    return UNITS.get(part.estimand, {}).get(part.along or "", "")


def signed(interval: Interval) -> str:
    """A difference in points, with its interval."""
    return f"{interval.mean:+.2f} {_bounds(interval)}"


def _slope_cells(one: Slope) -> tuple[str, ...]:
    curvature = signed(one.curvature) if one.curvature else "–"
    return (one.method, f"{one.slope.mean:+.2f}", _bounds(one.slope), str(one.slope.n), curvature)


def _bounds(interval: Interval) -> str:
    # A space that does not break keeps the bounds on one line.
    return "–" if math.isnan(interval.low) else f"[{interval.low:+.2f},\N{NO-BREAK SPACE}{interval.high:+.2f}]"


def _seeds(unit: Unit) -> str:
    if unit.obstacles or unit.verdict != "undecided":
        return ""
    return f"; about {unit.seeds} seeds would decide" if unit.seeds else "; no 10,000 seeds would decide"


def _tally(units: Sequence[Unit]) -> str:
    counts = Counter(f"undecided ({unit.obstacles[0].kind})" if unit.obstacles else str(unit.verdict) for unit in units)
    return f"Of {len(units)} unit{'s' if len(units) > 1 else ''}: {', '.join(f'{count} {what}' for what, count in counts.items())}."


def _comparison_cells(unit: Unit, one: Comparison) -> tuple[str, ...]:
    said = one.evidence
    if said is None:
        only = f"{next(iter(one.values.values())):+.2f}" if one.values else "–"
        return (one.against, only, str(len(one.values)), *["–"] * 5)
    return (
        one.against,
        signed(said.interval),
        str(said.n),
        p_value(one.p),
        p_value(one.opposite_p),
        p_value(one.adjusted_opposite_p),
        p_value(said.p_two_sided),
        p_value(said.p_sign_flip),
    )


def _members(judged: Judged) -> list[Member]:
    return list({(member.place, member.method): member for unit in judged.units for member in unit.members}.values())


def _cell(member: Member) -> tuple[str, ...]:
    row = member.row
    if row is None:
        return (member.place.name, member.method, *["–"] * 4, "not run")
    accuracy = row.accuracy.scaled(100.0)
    return (
        member.place.name,
        member.method,
        chosen_rate(row),
        str(accuracy.n) if accuracy.n == row.wanted else f"{accuracy.n} of {row.wanted}",
        percent(row.accuracy.mean),
        "–" if accuracy.n == 1 else f"[{accuracy.low:.2f}, {accuracy.high:.2f}]",
        diverged(row.diverged, accuracy.n),
    )
