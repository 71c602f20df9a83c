# Claims under protocols as text: the table of claims × protocols, and a line for each pair.
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from affine_divergence.lab.claims import Judged, Part, Pooled, Standing, Tendency, Verdict
from affine_divergence.lab.report._claims import per_of, signed
from affine_divergence.lab.report._tables import p_value

TENDENCY_HEADERS = ("claim", "protocol", "verdict", "pooled lead, points [95 %]", "n", "p", "cells", "strict verdict")
SEVERITY: tuple[Verdict, ...] = ("contradicted", "undecided", "equivalent", "reproduced")
STRICT_ONLY = "strict rule"  # the column of studies from before there were protocols


@dataclass(frozen=True)
class Glance:
    """A cell of the table of claims × protocols."""

    verdict: str
    cells: str  # in how many the claim holds
    lead: str


def glances(judged: Sequence[Judged]) -> tuple[list[str], list[tuple[str, str, list[Glance | None]]]]:
    """The protocols, and a row a claim: its id, its statement, and what is found under each protocol."""
    found: dict[str, dict[str, Judged]] = {}
    for one in judged:
        found.setdefault(one.claim.id, {})[protocol_of(one)] = one
    protocols = list(dict.fromkeys(protocol_of(one) for one in judged))
    rows = []
    for claim, by_protocol in found.items():
        statement = next(iter(by_protocol.values())).claim.statement
        cells = [glance(by_protocol[protocol]) if protocol in by_protocol else None for protocol in protocols]
        rows.append((claim, statement, cells))
    return protocols, rows


def markdown_table(judged: Sequence[Judged]) -> list[str]:
    """The table of claims × protocols in Markdown, a line a claim."""
    protocols, rows = glances(judged)
    lines = [f"| claim | {' | '.join(protocols)} |", "|---" * (len(protocols) + 1) + "|"]
    for claim, _, cells in rows:
        texts = ["<br>".join(filter(None, (f"**{one.verdict}**", one.cells, one.lead))) if one else "–" for one in cells]
        lines.append(f"| {claim} | {' | '.join(texts)} |")
    return lines


def protocol_of(judged: Judged) -> str:
    """The protocol's name, or what stands in its place in older studies."""
    return judged.protocol.name if judged.protocol else STRICT_ONLY


def glance(judged: Judged) -> Glance:
    """The verdict, in how many cells the claim holds, and the smallest pooled lead."""
    if not judged.protocol:
        held = sum(unit.verdict == "reproduced" for unit in judged.deciding)
        return Glance(judged.verdict, f"holds in {held} of {len(judged.deciding)}", "")
    part, tendency = weakest_part(judged)
    lead = signed(tendency.weakest.evidence.interval) + per_of(part) if tendency.weakest else ""
    return Glance(judged.verdict, _held(judged), lead)


def weakest_part(judged: Judged) -> tuple[Part, Tendency]:
    """The part on which the verdict hangs."""
    return min(judged.tendencies, key=lambda pair: SEVERITY.index(pair[1].verdict))


def tendency_line(judged: Judged) -> tuple[str, ...]:
    """A claim under a protocol, under TENDENCY_HEADERS."""
    part, tendency = weakest_part(judged)
    pooled = tendency.weakest
    lead, n, p = "–", "–", "–"
    if pooled:
        lead = f"{signed(pooled.evidence.interval)}{per_of(part)}, {part.method} against {pooled.against}"
        n, p = str(pooled.evidence.n), p_value(_p(tendency, pooled))
    return (judged.claim.id, protocol_of(judged), judged.verdict, lead, n, p, cells_of(judged), judged.strict)


def pooled_lines(tendency: Tendency) -> list[tuple[str, ...]]:
    """The pooled leads of a part, under POOLED_HEADERS."""
    return [
        (one.against, str(one.units), signed(one.evidence.interval), str(one.evidence.n), p_value(one.p), p_value(one.opposite_p))
        for one in tendency.pooled
    ]


POOLED_HEADERS = ("against", "cells", "mean difference, points [95 %]", "n", "p", "opposite, Holm")


def cells_of(judged: Judged) -> str:
    """How many cells stand where, and why some have no verdict."""
    counts = Counter(unit.standing or f"no verdict ({unit.obstacles[0].kind if unit.obstacles else 'open'})" for unit in judged.deciding)
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def _held(judged: Judged) -> str:
    standings = [unit.standing for unit in judged.deciding]
    known = [one for one in standings if one]
    good: Standing = "equivalent" if all(unit.part.estimand == "parity" for unit in judged.deciding) else "ahead"
    unknown = f", {len(standings) - len(known)} without verdict" if len(known) < len(standings) else ""
    return f"{good} in {known.count(good)} of {len(known)}{unknown}"


def _p(tendency: Tendency, pooled: Pooled) -> float:
    return pooled.opposite_p if tendency.verdict == "contradicted" else pooled.p
