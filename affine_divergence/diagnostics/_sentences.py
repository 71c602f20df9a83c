# What a diagnosis says in sentences: coverage, verdicts with their reasons, loss, self-check, what was assumed, what good looks like.
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from affine_divergence.diagnostics._records import VERDICTS, Coverage, Diagnosis, Row
from affine_divergence.diagnostics._tables import PLAIN, name_of, number, twinned

K = TypeVar("K")
V = TypeVar("V")
_RESOLVED = 1e-5  # 100 times the rounding of float32
_NOISE = 0.01  # of a realised change: above it two losses that should be one are no rounding
_EXACT = 1e-3  # an error of a check above it that is none is of rounding: of a narrow dtype, or of a sum that is nothing else
_NAMED = 8  # names in a line before the rest is counted
_ASSUMED = "lr assumed"  # of what a diagnosis tells about itself: whether the learning rate is nobody's choice
SCOPE = (
    "Every number is of a layer's own parameters at the input that the layer had, to first order; the layers before it move too, and how "
    "that changes its input is not in them."
)
GOOD = (
    "Good is a step that moves every row of a layer's output against its own gradient, and all by one factor. In a plain layer a row alone "
    "has the multiplier ‖x‖² + 1, in a corrected one the same as all others; what the other rows of the batch do comes on top."
)
BENIGN = (
    "Benign: a large interference while the alignment is near 1 (the rows pull the same way, as with inputs after a ReLU or equal tokens), "
    "a few rows uphill while the efficiency is near -1 (they are those with small gradients), a rank below its limit where rows repeat or "
    "patches overlap, and under Adam or momentum an alignment below that of the plain gradient: compare their multipliers with each other, "
    "not with 1."
)

CORRECTIONS = (
    "actual: the step of the optimiser; none: that of plain gradient descent; affine-like: layers (Wx + b)/√(‖x‖² + 1) instead of Wx + b; "
    "norm-like: Wx/√(‖x‖² + ε) + b; sample: each row's part of the gradient divided by its G_ii; batch: the step that moves all rows "
    "against their own gradients, as far as there is one. Where the loss is told the steps are all of one length, that of the actual one."
)
GLOSSARY = (  # a column of the table of calls, what it says, what is ideal
    (
        "rows",
        "what the outputs z of one call of a layer are made of: rows of a linear layer's input, tokens, or patches of images; a row's "
        "gradient g is that of the loss by its z",
        "",
    ),
    (
        "multiplier",
        "how far the step moves the z of a row against its g, in units of lr · g: 5th percentile, median and 95th percentile of the rows",
        "one number for all rows",
    ),
    ("spread", "standard deviation of the rows' multipliers over the size of their mean", "0"),
    (
        "G p95/p5",
        "how far apart the multipliers are that rows would have alone: 95th over 5th percentile of G_ii = ‖x‖² + 1 (of what learns: the "
        "weight ‖x‖², the bias 1); the affine divergence proper",
        "1",
    ),
    ("alignment", "cosine between what the step does to the z of a row and -g, the median of the rows", "1"),
    ("uphill", "share of the rows whose z the step moves along g, which raises the loss", "0 %"),
    (
        "interference",
        "what the other rows of the batch do to the z of a row against what the row does itself, rows weighted by their gradients",
        "0",
    ),
    ("rank", "how many independent directions the rows have, of those that there could be: what a batch correction can work with", ""),
    ("δW/W", "length of the weight's change over that of the weight; usual trainings have some 1e-3", ""),
    ("efficiency", "cosine between the change of all z of the call and their gradient, so that rows count by their gradients", "-1"),
)


def coverage_lines(diagnosis: Diagnosis) -> list[str]:
    """What was measured, then a line for each reason why something was not."""
    measured = [one for one in diagnosis.coverage if one.status == "measured"]
    skipped = [one for one in diagnosis.coverage if one.status == "skipped"]
    held, total = (sum(one.parameters - one.shared for one in ones) for ones in (measured, diagnosis.coverage))
    share = f", which hold {number(100 * held / total)} % of the {total:,} parameters" if total else ""
    lines = [f"Measured: {_counted(len(measured), 'module')}, {_counted(len(diagnosis.rows), 'call')}{share}."]
    late = [one for one in diagnosis.coverage if one.fired != one.calls]
    for (calls, fired), ones in _grouped(((one.calls, one.fired), one) for one in late).items():
        each = " each" if len(ones) > 1 else ""
        of = f"{fired} of {_counted(calls, 'call')}{each}"
        lines.append(f"A gradient that adds to .grad arrived for {of}: {_names([one.module for one in ones])}.")
    if skipped:
        below = [f"  {reason}: {'; '.join(_of_types(ones))}." for reason, ones in _grouped((one.reason, one) for one in skipped).items()]
        starred = "; * is any number, in brackets how many they are" if any("*" in line for line in below) else ""
        lines += [f"Skipped: {_counted(len(skipped), 'module')}{starred}.", *below]
    return lines


def headline(diagnosis: Diagnosis) -> str:
    """How many calls have which verdict, worst first."""
    if not diagnosis.rows:
        return "No call of any layer was measured."
    counts = Counter(row.verdict for row in diagnosis.rows)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"Of {_counted(len(diagnosis.rows), 'call')}: {said}."


def notes(diagnosis: Diagnosis) -> list[str]:
    """What the table of calls does not say of itself."""
    said = []
    if any(row.masked for row in diagnosis.rows):
        said.append("rows: in brackets those whose gradient is exactly 0, which are left out.")
    if twinned(diagnosis):
        said.append(f"{PLAIN}: what plain gradient descent would have done at the same learning rate.")
    return said


def reasons(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Verdict, calls and reason of all that are not ok, equal ones together."""
    several = any(row.call for row in rows)
    found = _grouped(((row.verdict, row.reason), row) for row in rows if row.verdict != "ok")
    return [
        (verdict, _names([f"{name_of(row.module)}, call {row.call}" if several else row.module for row in ones]), reason)
        for (verdict, reason), ones in found.items()
    ]


def index_meaning(kind: str) -> str:
    """What the numbers are that say which row of a call is meant, by the type of its layer."""
    if re.search(r"Conv(Transpose)?[123]d$", kind):
        axes = "image, group, then position in the layer's output"
    elif kind.endswith("Embedding"):
        axes = "place along the axes of the layer's input"
    elif kind.endswith("Linear") or kind in ("Conv1D", "MultiheadAttention"):  # Conv1D: the linear layer of transformers' GPT-2
        axes = "place along the axes of the layer's input before the last"
    else:
        axes = "place along the axes of the layer's rows"
    return f"{axes}, counted from 0"


def loss_line(diagnosis: Diagnosis) -> str | None:
    """The loss before and after the step, and how much of that the first order says. None where it was not asked for."""
    loss = diagnosis.loss
    if loss is None:
        return None
    told = abs(loss.predicted) > _RESOLVED * abs(loss.before)  # else the difference of two losses is mostly their rounding
    of = f", {number(loss.realised / loss.predicted)} times the predicted" if told else ""
    said = (
        f"The step on the same batch: loss {loss.before:.5g} before, {loss.after:.5g} after. Change predicted to first order "
        f"{number(loss.predicted)}, realised {number(loss.realised)}{of}."
    )
    noise = abs(loss.repeated - loss.before)  # NaN, where it was not asked for, is above nothing
    if noise > max(_NOISE * abs(loss.realised), _RESOLVED * abs(loss.before)):
        said += (
            f" A second forward from the same beginning gave {loss.repeated:.5g}: something of the model or the loss is not had back "
            "(numbers that no known generator draws, say), and realised changes are off by as much."
        )
    elif told and loss.realised * loss.predicted < 0:
        said += " The step is too long: the loss went the other way, whatever the verdicts, which are of the first order, say."
    return said


def check_lines(diagnosis: Diagnosis) -> list[str]:
    """How far the captured rows are from the gradient that the parameters have, then a line for each that fails."""
    checks = diagnosis.checks
    if not checks:
        return []
    failing = [one for one in checks if not one.ok]
    rounded = [one.parameter for one in checks if one.ok and one.error > _EXACT]
    told = [one for one in checks if not one.ok or one.error <= _EXACT]
    # A Monitor, which knows no loss, sees gradients after they were clipped.
    factor = ", up to a factor, by which clipping may have shortened it" if diagnosis.loss is None else ""
    first = (
        f"Self-check, the gradients that the captured rows add up to against those that the parameters had{factor}: "
        f"{len(checks) - len(failing)} of {_counted(len(checks), 'parameter')} agree{'s' if len(checks) == 1 else ''}"
        + (f", {len(rounded)} of them as far as rounding lets {_it(rounded)} ({_names(rounded)})" if rounded else "")
    )
    if told:
        worst = max(told, key=lambda one: -math.inf if math.isnan(one.error) else one.error)
        first += f"; largest relative error{' of the others' if rounded else ''} {number(worst.error)} ({worst.parameter})"
    return [f"{first}.", *(f"  {one.parameter}: error {number(one.error)}, cosine {number(one.cosine)}: {one.reason}" for one in failing)]


def refusals(diagnosis: Diagnosis) -> list[str]:
    """Why a correction has no numbers for some calls, a line for each kind and reason."""
    found = _grouped(((one.kind, one.reason), one) for one in diagnosis.counterfactual if one.reason)
    return [f"{kind} has no numbers for {_names([one.module for one in ones])}: {reason}." for (kind, reason), ones in found.items()]


def about_items(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What was diagnosed and assumed, by name; without the number of inputs of each layer, which the figures show."""
    about = {key: _value(value) for key, value in diagnosis.about.items() if key not in ("inputs", _ASSUMED)}
    if diagnosis.about.get(_ASSUMED) and "lr" in about:
        about["lr"] += f" (assumed, nobody gave one{'; the change of the loss is that of this rate' if diagnosis.loss else ''})"
    return [(key.replace("_", " "), value) for key, value in about.items()]


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(one)}" for key, one in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(one) for one in value) or "none"
    return str(value)


def _of_types(ones: Sequence[Coverage]) -> list[str]:
    by_type = _grouped((one.type, one) for one in ones)
    return [f"{kind} {_names([one.module for one in own])}" for kind, own in by_type.items()]


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _names(modules: Sequence[str]) -> str:
    """Names that differ in numbers only are one, with a star for them and how many they are: blocks.*.norm (12)."""
    alike = _grouped((_pattern(module), module) for module in modules)
    named = [f"{pattern} ({len(own)})" if len(own) > 1 else name_of(own[0]) for pattern, own in alike.items()]
    return ", ".join(named[:_NAMED]) + (f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "")


def _pattern(module: str) -> str:
    # Names that are nothing but numbers, as in an nn.Sequential, would all be a star.
    starred = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
    return starred if re.search(r"[^.*]", starred) else module


def _it(ones: Sequence[object]) -> str:
    return "it" if len(ones) == 1 else "them"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
