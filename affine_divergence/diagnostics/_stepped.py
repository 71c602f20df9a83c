# A step, told: from what was captured and changed to coverage, rows, checks and samples.
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from affine_divergence.diagnostics._capture import Capture
from affine_divergence.diagnostics._change import Change, Parameter
from affine_divergence.diagnostics._coverage import coverage, fired_of
from affine_divergence.diagnostics._check import check
from affine_divergence.diagnostics._gradients import plain as plain_gradient, total
from affine_divergence.diagnostics._records import VERDICTS, Check, Coverage, Row, Samples
from affine_divergence.diagnostics._samples import samples_of
from affine_divergence.diagnostics._step import account, rows_of
from affine_divergence.diagnostics._told import Told, told

if TYPE_CHECKING:
    from torch import Tensor


class Stepped(NamedTuple):
    """What there is to say, and the calls themselves."""

    coverage: list[Coverage]
    rows: list[Row]
    checks: list[Check]
    samples: list[Samples]
    calls: list[Told]


def stepped(
    model: torch.nn.Module,
    capture: Capture,
    change: Change,
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
    calls, failed = told(capture.in_order(), change.before, loss_scale)
    names = {p: name for name, p in model.named_parameters()}
    gradients = total(calls, plain_gradient) if plain else None
    accounts = [account(one, change, gradients, ranks=ranks) for one in calls]
    checks = [] if gradients is None else check(accounts, gradients, had, names, change, scaled=scaled)
    rows = rows_of(accounts, {one.parameter: one.reason for one in checks if not one.ok}, names)
    worst = sorted(range(len(rows)), key=lambda place: VERDICTS.index(rows[place].verdict))[:sampled]
    lines = coverage(model, capture.found, capture.forwards, fired_of(capture.calls), failed, compiled=compiled)
    return Stepped(lines, rows, checks, [samples_of(accounts[place], kept) for place in worst], calls)


@contextmanager
def without_autocast() -> Iterator[None]:
    """In the dtypes that are asked for, whatever the caller's context."""
    with ExitStack() as stack:
        for device in {"cpu", *(["cuda"] if torch.cuda.is_available() else [])}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
