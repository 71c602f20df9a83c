# Small claims and grids, and their judging, for the tests of verdicts.
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from makers import grid, record

from affine_divergence.lab.claims import Judged, judge, parse_claims
from affine_divergence.lab.store import Record
from affine_divergence.lab.summary import summarise
from affine_divergence.lab.trial import Trial
from affine_divergence.lab.tuning import plan

HEAD = 'version = 1\nlevel = 0.05\n[[claim]]\nid = "C"\nstatement = "It is so."\n'
Points = Callable[[Trial], float]


def table(name: str, values: Mapping[str, Any]) -> str:
    rows = {key: str(value).lower() if isinstance(value, bool) else repr(value) for key, value in values.items() if value is not None}
    return f"[[{name}]]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())


def part(**fields: Any) -> str:
    cells = {"activation": ["tanh"], "depth": [3], "width": [16], "batch_size": [32]} | fields.pop("cells", {})
    values = {"estimand": "lead", "method": "affine-like", "rivals": ["none"], "direction": "greater", "margin": 0.5} | fields
    return table("claim.part", values) + table("claim.part.cells", cells)


def block(**fields: Any) -> str:
    values = {
        "method": ["affine-like", "none"],
        "width": 16,
        "depth": 3,
        "activation": "tanh",
        "batch_size": 32,
        "learning_rate": 0.1,
        "seed": [0, 1, 2],
        "epochs": 2,
    } | fields
    return table("grid", values)


def judged(claim: str, blocks: str, points: Points, change: Callable[[Record], Record | None] = lambda one: one) -> Judged:
    the_grid = grid(f'study = "s"\ndata = "digits"\nclaims = ["C"]\n{blocks}')
    records = [changed for one in plan(the_grid, {}).missing if (changed := change(record(one, points(one) / 100))) is not None]
    (found,) = judge(parse_claims(HEAD + claim), summarise(the_grid, records))
    return found


def leads(*values: float) -> Points:
    # Affine-like's points over the rival by seed; the rival and all others at 40 plus something of the seed.
    def points(one: Trial) -> float:
        return 40.0 + 3.0 * (one.seed % 2) + (values[one.seed] if one.method == "affine-like" else 0.0)

    return points


def p_of_three(t: float) -> float:
    return 0.5 - t / (2 * math.sqrt(2 + t * t))  # Student's tail for 2 degrees of freedom
