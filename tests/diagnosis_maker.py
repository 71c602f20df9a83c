# Made-up diagnoses, for tests of what is shown of one: every number can be set, none is measured.
from __future__ import annotations

import dataclasses
import math
from typing import Any

from affine_divergence.diagnostics._records import Check, Counterfactual, Coverage, Diagnosis, LossChange, Row, Samples, Step

NAN = math.nan
UPHILL = {"multiplier_p5": -4.0, "multiplier_median": -0.5}
KINDS = ("none", "affine-like", "norm-like", "sample", "batch")


def row(module: str = "fc", **fields: Any) -> Row:
    """A row whose every number is its own; those of the plain gradient are 1.01 times those of the actual change, but for those given."""
    values: dict[str, Any] = {
        "module": module,
        "call": 0,
        "type": "Linear",
        "rows": 500,
        "masked": 12,
        "multiplier_p5": 3.0,
        "multiplier_median": 8.25,
        "multiplier_p95": 21.5,
        "multiplier_mean": 9.5,
        "multiplier_cv": 0.61,
        "alignment_median": 0.873,
        "below_zero": 0.0246,
        "interference": 1.37,
        "rank": 97,
        "rank_limit": 513,
        "update_ratio": 0.00123,
        "efficiency": -0.842,
        "verdict": "ok",
        "reason": "every row moves against its own gradient",
        "self_term_p5": 2.5,
        "self_term_median": 5.75,
        "self_term_p95": 9.25,
    }
    twins = {f"{name}_plain" for name in (field.name.removesuffix("_plain") for field in dataclasses.fields(Row) if "_plain" in field.name)}
    values |= {name: 1.01 * values[name.removesuffix("_plain")] for name in twins}
    return Row(**values | fields)


def covered(module: str, **fields: Any) -> Coverage:
    """A measured module, or with `reason` a skipped one."""
    status = "skipped" if fields.get("reason") else "measured"
    values = {"module": module, "type": "Linear", "status": status, "reason": "", "parameters": 1000, "calls": 1, "fired": 1}
    return Coverage(**values | fields)


def check(parameter: str, **fields: Any) -> Check:
    """A parameter whose gradient the rows explain, or with ok=False don't."""
    return Check(**{"parameter": parameter, "error": 1e-7, "cosine": 1.0, "ok": True, "reason": ""} | fields)


def counterfactual(kind: str, module: str, **fields: Any) -> Counterfactual:
    """What a correction would do, at numbers that say which it is."""
    place = KINDS.index(kind)
    basis = "first order, g held fixed" if kind in ("affine-like", "norm-like") else "exact"
    values: dict[str, Any] = {
        "kind": kind,
        "module": module,
        "call": 0,
        "type": "Linear",
        "rows": 500,
        "masked": 12,
        "multiplier_p5": 0.5,
        "multiplier_median": 1.0 + place,
        "multiplier_p95": 2.0 + place,
        "multiplier_mean": 1.1 + place,
        "multiplier_cv": 0.1 * place,
        "alignment_median": 0.5 + 0.1 * place,
        "below_zero": 0.05,
        "interference": NAN if kind == "batch" else 0.9,
        "efficiency": -0.5 - 0.1 * place,
        "basis": basis,
        "reason": "",
    }
    return Counterfactual(**values | fields)


def samples(module: str = "fc", count: int = 60, **fields: Any) -> Samples:
    """Rows of a sequence of tokens, of which every second was kept; the first of them masked, the last one pushed uphill."""
    values: dict[str, Any] = {
        "module": module,
        "call": 0,
        "axes": (count, 2),
        "index": tuple(range(0, 2 * count, 2)),
        "total": 2 * count,
        "multiplier": (NAN, *(2.0 + 0.1 * (i * 37 % count) for i in range(1, count - 1)), 300.0),
        "alignment": (NAN, *(0.9 - 0.3 * (i * 23 % count) / count for i in range(1, count - 1)), -0.4),
        "gradient": (0.0, *(0.01 * (1 + i * 11 % count) for i in range(1, count))),
    }
    return Samples(**values | fields)


def diagnosis(**fields: Any) -> Diagnosis:
    """Three layers, one of each verdict, with all that a diagnosis can say."""
    rows = (
        row("embed", type="Embedding", multiplier_cv=0.05),
        row("blocks.0.fc", verdict="look", reason="interference is above 1", interference=4.5, below_zero=0.31, alignment_median=0.22),
        row("head", verdict="broken", reason="most rows go uphill", below_zero=0.61, alignment_median=-0.12, **UPHILL),
    )
    values: dict[str, Any] = {
        "step": 7,
        "about": {"model": "Net", "optimizer": "SGD", "lr": 0.1, "inputs": {"embed": 1000, "blocks.0.fc": 512, "head": 64}},
        "coverage": (
            *(covered(one.module, type=one.type) for one in rows),
            *(covered(f"blocks.{i}.norm", type="LayerNorm", reason="of a type that is not measured", parameters=64) for i in range(12)),
            covered("lost", reason="not called", calls=0, fired=0),
        ),
        "rows": rows,
        "checks": (
            check("embed.weight"),
            check("head.weight", error=0.31, cosine=0.95, ok=False, reason="the weight is used outside the layer"),
        ),
        "loss": LossChange(before=2.3026, after=2.2526, predicted=-0.0541, realised=-0.05),
        "counterfactual": tuple(counterfactual(kind, one.module) for one in rows for kind in KINDS),
        "steps": tuple(
            Step(kind=kind, norm=0.125, predicted=-0.04 - 0.01 * i, realised=-0.035 - 0.01 * i)
            for i, kind in enumerate(("actual", "none", "sample", "batch"))
        ),
        "samples": (samples("embed"), samples("head")),
    }
    return Diagnosis(**values | fields)


def called(name: str) -> Diagnosis:
    """A diagnosis whose every module, type and parameter has this name, as the model itself."""
    return diagnosis(
        about={"model": name, "inputs": {name: 7}, name: [name]},
        coverage=(covered(name, type=name), covered(name, type=name, reason=f"in {name}")),
        rows=(row(name, type=name, verdict="look", reason=f"of {name}"),),
        checks=(check(name, ok=False, reason=f"of {name}"),),
        counterfactual=(counterfactual("sample", name, type=name), counterfactual("batch", name, reason=f"of {name}")),
        samples=(samples(name),),
    )
