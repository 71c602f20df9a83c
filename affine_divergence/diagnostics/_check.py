# The self-check: the gradients that the captured rows add up to, against those that the optimiser had.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._gradients import Gradients, plain, total
from affine_divergence.diagnostics._maps import ConvMap, LinearMap, Pair, SampleMap
from affine_divergence.diagnostics._records import Check
from affine_divergence.diagnostics._step import Account
from affine_divergence.diagnostics._told import Told
from affine_divergence.diagnostics._transfer import transferred
from affine_divergence.gradient._solve import solve_dtype

if TYPE_CHECKING:
    from torch import Tensor

_SINE = 1e-6  # by a cosine of which half the digits are left
_MARGIN = 8.0
_COARSE = 1e-4  # eps of float16 and bfloat16 is above, in which √N of them would hide everything
_PART = 2**16  # numbers compared at a time


class Compared(NamedTuple):
    """A parameter's gradient by the rows and as it was: both lengths, the difference's, the cosine, and what sums round to."""

    parameter: Parameter
    numbers: list[Tensor]
    eps: float
    gone: bool  # there was none


def compared(accounts: Sequence[Account], gradients: Gradients, had: Mapping[Parameter, Tensor], before: Before) -> list[Compared]:
    """Of all parameters of these calls, with the gradients that they had when the optimiser stepped."""
    calls = [one.told for one in accounts]
    if any(one.layer.correction == "sample" for one in calls):
        gradients = total(calls, _as_its_layer)
    # The gradient of a batch-corrected layer hangs on its average and its group: it is not made again.
    left_out = {part.parameter for one in calls if one.layer.correction == "batch" for part in one.layer.parts if part is not None}
    eps = {part.parameter: max(c.eps for c in calls) for one in calls for part in one.layer.parts if part is not None}
    roundings = _roundings(accounts)
    return [
        Compared(p, [*_numbers(gradient, had.get(p), -1.0 if p in before.maximized else 1.0), roundings[p]], eps[p], p not in had)
        for p, gradient in gradients.items()
        if p not in left_out
    ]


def checks(found: Sequence[Compared], names: Mapping[Parameter, str], *, scaled: bool) -> list[Check]:
    """The self-check of each parameter.

    A step of plain gradient descent changes a parameter by −lr times the gradient it had; the captured rows say what that should be.
    With scaled, a factor between both is nothing wrong: clipping, or the scale of a loss.
    """
    made = []
    for one, (by_rows, had, difference, cosine, rounding) in zip(found, transferred([one.numbers for one in found]), strict=True):
        if scaled:  # of the rows' gradient what is aside of the other; all of it where one is 0 or not a number
            size, left = by_rows, by_rows * (math.sqrt(max(0.0, 1.0 - cosine * abs(cosine))) if math.isfinite(cosine) else 1.0)
        else:
            size, left = had, difference
        # What the sum of the rows rounds to is no error: the gradient of a bias before a batch normalisation is nothing else.
        finite = math.isfinite(by_rows) and math.isfinite(had)
        ok = finite and left <= _tolerance(one.eps, scaled=scaled) * size + rounding and (by_rows > 0.0 or not scaled or had == 0.0)
        error = left / size if size else (math.inf if left else 0.0)
        reason = f"the captured calls explain its gradient only in part (error {error:.2g}, cosine {cosine:.4f}): {_CAUSES}"
        reason = "" if ok else _GONE if one.gone else reason if finite else _NOT_FINITE
        made.append(Check(parameter=names.get(one.parameter, "?"), error=error, cosine=cosine, ok=ok, reason=reason))
    return made


def _tolerance(eps: float, *, scaled: bool) -> float:
    if eps > _COARSE:
        return 5e-2
    return 1e-3 if eps > 1e-10 else _SINE if scaled else 1e-8


_GONE = "its gradient was gone when the optimiser stepped: something else had stepped, or cleared it"
_NOT_FINITE = "its gradient, or what the captured calls make of it, is not finite: there is nothing to compare"
_CAUSES = (
    "a gradient penalty (create_graph=True), a use of its parameters that no hook sees, a gradient changed or in part cleared by hand, or "
    "an output hook"
)


def _as_its_layer(one: Told) -> Pair:
    map_ = one.rows.map
    if one.layer.correction != "sample" or not isinstance(map_, (LinearMap, ConvMap)):
        return plain(one)
    weight, bias = SampleMap(map_).gradients(one.rows.x, map_.vectors(one.rows.g), one.weight, one.learns)
    return weight if one.needed[0] else None, bias if one.needed[1] else None


def _roundings(accounts: Sequence[Account]) -> dict[Parameter, Tensor]:
    """Of the sums over rows, as of as many independent ones: √(Σ ‖g_i‖²G_ii) times the rounding of g, with a margin."""
    found: dict[Parameter, Tensor] = {}
    for one in accounts:
        # Torch's own sum for a convolution's bias rounds by up to 0.3 √N eps: measured at N from 64 to 65,536.
        margin = max(_MARGIN, math.sqrt(one.sums.gg.numel())) if one.told.eps < _COARSE else _MARGIN
        size = margin * one.told.eps * (one.sums.gg * one.sums.own).sum().sqrt()
        for part in one.told.layer.parts:
            if part is not None:
                found[part.parameter] = found[part.parameter] + size if part.parameter in found else size
    return found


def _numbers(predicted: Tensor, actual: Tensor | None, sign: float) -> list[Tensor]:
    """The lengths of both and of their difference, and the cosine, which is 1 where both are 0."""
    if actual is None:
        actual = torch.zeros_like(predicted)
    actual = actual.to_dense() if actual.is_sparse else actual
    sums = torch.zeros(4, dtype=solve_dtype(actual.device), device=actual.device)
    exact = predicted.dtype == sums.dtype
    for p, a in zip(predicted.reshape(-1).split(_PART), actual.reshape(-1).split(_PART), strict=True):
        p, a = p.to(sums.dtype), a.to(sums.dtype)
        pp, aa, pa = p.dot(p), a.dot(a), sign * p.dot(a)
        rest = (p - sign * a).square_().sum() if exact else pp - 2 * pa + aa  # of float32 the difference is above what that rounds to
        sums += torch.stack([pp, aa, pa, rest])
    pp, aa, pa, rest = sums.unbind()
    rest = rest.clamp(min=0.0)
    cosine = pa / (pp.sqrt() * aa.sqrt())
    return [pp.sqrt(), aa.sqrt(), rest.sqrt(), torch.where((pp == 0) & (aa == 0), 1.0, cosine.clamp(-1.0, 1.0))]
