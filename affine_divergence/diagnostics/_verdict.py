# From the measures of a row to its verdict: thresholds, and a sentence that says what was found and what good looks like.
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from affine_divergence.diagnostics._records import Verdict

SPREAD = 10.0
"""p95/p5 of the multiplier above which rows of one batch learn at rates an order of magnitude apart."""
UPHILL = 0.25
"""Share of rows pushed uphill above which a row is worth a look; above one half most rows are."""
MOST = 0.5
UPDATE = 0.1
"""‖δW‖/‖W‖ of one step above which first order says little; usual trainings have some 1e-3."""


def verdict(row: Mapping[str, Any], lr: float, check: str = "") -> tuple[Verdict, str]:
    """The verdict of a row's measures, with the reason; check is what the self-check found wrong, if anything."""
    if not row["rows"]:
        return "look", "no row has a gradient: nothing is learned from this call"
    measured = [row[name] for name in ("multiplier_median", "alignment_median", "efficiency")]
    if lr == 0.0:
        return "look", "its learning rate is 0: nothing moves"
    if math.isnan(lr):
        return "look", "its parameter group has no learning rate: there are no multipliers"
    if row["update_ratio"] == 0.0:
        return "look", "the step left its parameters as they were"
    if not all(map(math.isfinite, measured)):
        return "broken", "inputs, gradients or the change of its parameters are not finite"
    if check:
        return "look", check
    uphill = row["below_zero"]
    if row["efficiency"] > 0.0:
        return "broken", f"to first order its step raises the loss: efficiency {row['efficiency']:+.2f}, where −1 is ideal and below 0 descends"
    if uphill > MOST:
        return "broken", f"{uphill:.0%} of the rows are pushed uphill, more than half; ideal is none"
    found = []
    if uphill > UPHILL:
        found.append(f"{uphill:.0%} of the rows are pushed uphill (above {UPHILL:.0%}; ideal is none)")
    low, high = row["self_term_p5"], row["self_term_p95"]
    if high > SPREAD * low:
        found.append(f"rows alone would learn at rates {high / low:.3g} times apart (p95/p5 of G_ii above {SPREAD:g}; ideal is 1)" if low > 0 else
                     "some rows alone would not learn at all (G_ii = 0; ideal is one number for all)")
    if row["update_ratio"] > UPDATE:
        found.append(f"one step changes the weight by {row['update_ratio']:.0%} of its norm (above {UPDATE:.0%}: first order says little)")
    return ("look", "; ".join(found)) if found else ("ok", "")
