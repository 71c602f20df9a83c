# From the measures of a row to its verdict: thresholds, and a sentence that says what was found and what good looks like.
#
# They tell the unusual from the usual: layers of common networks push up to some 50 % of their rows uphill at efficiencies of mostly
# -0.4 to -0.1 (records/diagnosis), which alone is nothing to look at: late in a training those are the rows of small gradients.
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from affine_divergence.diagnostics._records import Verdict

RISING = 0.05
"""Efficiency above which the step of a layer clearly raises the loss."""
UPHILL, WEAK = 0.4, -0.1
"""Share of rows pushed uphill, at an efficiency no better; of steps that had nothing to do with their gradients one half would be, at 0."""
STEEP = 0.9
"""Of the slope at which the plain gradient goes down: a step that goes up as steeply is taken for more than momentum of other batches.

A step of plain descent with its sign wrong has 1.
"""
SPREAD = 10.0
"""p95/p5 of G_ii: how far apart the learning rates of rows are that are alone."""
UPDATE = 0.1
"""‖δW‖/‖W‖ of one step; usual trainings have some 1e-3."""
RULES = (
    f"Verdicts: broken is what is not finite, or a step against its objective (efficiency above {RISING:+g}, over all calls that share "
    f"the parameters). Where the plain gradient goes down (its efficiency is below {WEAK:g}) and the step goes up less than {STEEP:.0%} as "
    f"steeply, momentum of other batches does that, and it is a look. Look is also an efficiency above 0, more than {UPHILL:.0%} of the "
    f"rows uphill at an efficiency above {WEAK:g}, rows that alone would learn at rates more than {SPREAD:g} times apart (p95/p5 of G_ii), "
    f"a step of more than {UPDATE:.0%} of the parameters, a call none of whose rows has a gradient, a learning rate of 0, a step that "
    f"leaves the parameters or all rows as they were, and a gradient that the self-check does not explain, whatever the efficiency of what "
    f"was captured."
)


def verdict(
    row: Mapping[str, Any],
    lr: float,
    together: float,
    together_plain: float = math.nan,
    *,
    assumed: bool = False,
    check: str = "",
    aside: bool = False,
) -> tuple[Verdict, str]:
    """The verdict of a row's measures, with the reason.

    together: the efficiency of all calls that share the parameters, by the step and by the plain gradient, NaN where that is not known;
    assumed: the learning rate is nobody's choice; check: why the rows are not known to explain the gradient, which is the self-check's to
    say; aside: a pass with create_graph=True has reached the layer.
    """
    if not row["rows"]:
        return "look", _ASIDE if aside else "no row has a gradient: nothing is learned from this call"
    if lr == 0.0:
        return "look", "its learning rate is 0"
    if row["update_ratio"] == 0.0 and math.isnan(row["efficiency"]):  # not so where only the bias has moved
        return "look", "the step left its parameters as they were"
    if row["multiplier_p5"] == row["multiplier_p95"] == 0.0 and math.isnan(row["efficiency"]):
        return "look", "the step changes its parameters and moves none of its rows, as where these are zeros"
    measured = [row[name] for name in ("alignment_median", "efficiency")]
    if not all(map(math.isfinite, measured)):
        return "broken", "inputs, gradients or the change of its parameters are not finite"
    carried = together > RISING and together_plain < WEAK and together < -STEEP * together_plain
    against = together > RISING and not carried
    if against and not check:  # of rows that are a part of the gradient a step may well go up
        return "broken", _against(together) + _of_plain(together_plain)
    efficiency = row["efficiency"]
    rising = _against(together) if against else _rising(efficiency, together)
    found = [
        check,
        _carried(together, together_plain) if carried else rising,
        _uphill(row["below_zero"], efficiency),
        _spread(row["self_term_p5"], row["self_term_p95"]),
        "" if assumed else _update(row["update_ratio"]),
    ]
    reasons = [reason for reason in found if reason]
    return ("look", "; ".join(reasons)) if reasons else ("ok", "")


_ASIDE = (
    "no row has a gradient by itself: what is learned from this call comes by a pass with create_graph=True, as of a gradient penalty, "
    "which is not captured"
)


def _against(together: float) -> str:
    return f"to first order its step goes against its objective: efficiency {together:+.2f} (above {RISING:+g}; ideal is -1)"


def _of_plain(plain: float) -> str:
    """What the plain gradient says of a step that is broken."""
    if math.isnan(plain):
        return "; whether momentum of other batches does that is not known where the plain gradient is not (plain=False)"
    return f"; the plain gradient would go down about as steeply ({plain:+.2f}): is a sign wrong?" if plain < WEAK else ""


def _carried(together: float, plain: float) -> str:
    return (
        f"to first order the step goes against this batch's objective (efficiency {together:+.2f}), where the plain gradient would not "
        f"({plain:+.2f}): momentum or the moments of other batches; watch whether it stays"
    )


def _rising(efficiency: float, together: float) -> str:
    if efficiency <= 0.0:
        return ""
    others = "" if together > 0.0 else ", which other calls with its parameters outweigh"
    return f"to first order the step of this call goes against its objective: efficiency {efficiency:+.2f} (above 0; ideal is -1){others}"


def _uphill(share: float, efficiency: float) -> str:
    if share <= UPHILL or efficiency <= WEAK:
        return ""
    return f"{share:.0%} of the rows are pushed uphill (above {UPHILL:.0%}), at an efficiency of {efficiency:+.2f} (above {WEAK:g})"


def _spread(low: float, high: float) -> str:
    if high <= SPREAD * low:
        return ""
    if low <= 0.0:
        return "some rows alone would not move at all (G_ii = 0; ideal is one number for all)"
    return f"rows alone would learn at rates {high / low:.3g} times apart (p95/p5 of G_ii above {SPREAD:g}; ideal is 1)"


def _update(ratio: float) -> str:
    # Of a weight that was 0 the ratio is infinite: that of an output layer at the first step, say.
    if not UPDATE < ratio < math.inf:
        return ""
    return f"the step changes its parameters by {ratio:.0%} of their norm (above {UPDATE:.0%}: first order says little)"
