# A step, told: from what was captured and changed to coverage, rows, checks and samples.
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._capture import Capture
from affine_divergence.diagnostics._change import Before, Parameter
from affine_divergence.diagnostics._check import Compared, checks, compared
from affine_divergence.diagnostics._coverage import coverage
from affine_divergence.diagnostics._faults import reason_of
from affine_divergence.diagnostics._gradients import plain as plain_gradient, total
from affine_divergence.diagnostics._layers import Layer
from affine_divergence.diagnostics._records import Check, Coverage, Row, Samples, badness
from affine_divergence.diagnostics._samples import samples_of
from affine_divergence.diagnostics._step import Account, account, rows_of, together
from affine_divergence.diagnostics._told import Told, families, told

if TYPE_CHECKING:
    from torch import Tensor


class Stepped(NamedTuple):
    """What there is to say, and the calls themselves."""

    coverage: tuple[Coverage, ...]
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    samples: tuple[Samples, ...]
    calls: list[Told]

    def inputs(self) -> dict[str, int]:
        """The d of every layer of real inputs."""
        return {one.layer.name: one.rows.map.width(one.rows.x, one.weight) for one in self.calls if one.rows.x.is_floating_point()}


def stepped(
    model: torch.nn.Module,
    capture: Capture,
    before: Before,
    *,
    plain: bool,
    ranks: bool,
    had: Mapping[Parameter, Tensor],
    scaled: bool,
    sampled: int,
    kept: int,
    loss_scale: float = 1.0,
    compiled: bool = False,
) -> Stepped:
    """Every call measured. had: the gradients of the parameters, up to a factor where scaled; sampled: how many calls have samples."""
    calls, failed = told(capture.in_order(), before, loss_scale)
    names = {p: name for name, p in model.named_parameters()}
    accounts: dict[int, Account] = {}
    comparisons: list[Compared] = []
    for family in families(calls):
        try:
            of_family, found = _told_together(family, before, had, plain=plain, ranks=ranks)
        except Exception as error:
            failed |= dict.fromkeys((one.layer.name for one in family), reason_of(error))
            continue
        accounts.update((id(one.told), one) for one in of_family)
        comparisons += found
    checked = checks(comparisons, names, scaled=scaled)
    calls = [one for one in calls if id(one) in accounts]
    in_order = [accounts[id(one)] for one in calls]
    rows = rows_of(in_order, _unexplained(calls, checked, names, capture), capture.differentiated)
    worst = sorted(range(len(rows)), key=lambda place: badness(rows[place]))[:sampled]
    measured = {one.layer.name for one in calls}
    lines = coverage(model, capture, measured, failed, had, compiled=compiled)
    return Stepped(tuple(lines), tuple(rows), tuple(checked), tuple(samples_of(in_order[place], kept) for place in worst), calls)


def _told_together(
    family: Sequence[Told], before: Before, had: Mapping[Parameter, Tensor], *, plain: bool, ranks: bool
) -> tuple[list[Account], list[Compared]]:
    """Of the calls that share parameters, whose gradients are in memory here and no longer."""
    gradients = total(family, plain_gradient) if plain else None
    accounts = [account(one, before, gradients, ranks=ranks) for one in family]
    jointly = together(accounts)
    for one in accounts:
        one.numbers.update(jointly)
    return accounts, [] if gradients is None else compared(accounts, gradients, had, before)


def _unexplained(calls: Sequence[Told], checked: Sequence[Check], names: Mapping[Parameter, str], capture: Capture) -> dict[Layer, str]:
    """Why the rows of layers are not known to make their gradients: what the self-check says, or where there is none what was seen."""
    reasons = {one.parameter: one.reason for one in checked}
    found: dict[Layer, str] = {}
    for layer in {one.layer: None for one in calls}:
        own = [reasons[name] for part in layer.parts if part is not None and (name := names.get(part.parameter, "?")) in reasons]
        found[layer] = next((reason for reason in own if reason), "") if own else capture.doubt(layer)
    return found


@contextmanager
def without_autocast() -> Iterator[None]:
    """In the dtypes that are asked for, whatever the caller's context."""
    with ExitStack() as stack:
        for device in {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
