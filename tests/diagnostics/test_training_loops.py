# Random training loops: a step has the rows of what is in .grad, with the oracle's numbers, or it says that they do not explain it.
from __future__ import annotations

import copy
from collections.abc import Callable

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import agree
from torch import Tensor, nn
from training_loops import LAYERS, Called, Loop, Net, Step

Values = dict[nn.Parameter, Tensor]


@pytest.mark.parametrize("seed", range(40))
def test_every_step_of_a_random_training_loop_is_diagnosed_as_the_oracle_says(seed: int) -> None:
    assert sum(_compared(step) for step in Loop(seed).steps())


def _compared(step: Step) -> int:
    """How many rows were compared with the oracle's."""
    names = {p: name for name, p in step.net.named_parameters()}
    rates = {p: float(group["lr"]) for group in step.optimizer.param_groups for p in group["params"] if p.requires_grad}
    learning = {name: [p for p in step.net.get_submodule(name).parameters() if p.requires_grad] for name in LAYERS}
    learning = {name: ps for name, ps in learning.items() if rates.keys() & ps}
    bare = _bare(step.net, corrected=False)
    arrived, uncorrected = _gradients(step, _bare(step.net, corrected=True)), _gradients(step, bare)
    explained = {name: all(_along(p.grad, arrived[p]) for p in ps) for name, ps in learning.items()}
    whole = {name: explained[name] and _same([_calls(step, name, p) for p in ps]) for name, ps in learning.items()}
    count = 0
    assert {row.module for row in step.diagnosis.rows} <= learning.keys()
    for name, ps in learning.items():
        found = [row for row in step.diagnosis.rows if row.module == name]
        explains = all(check.ok for check in step.diagnosis.checks if check.parameter in {names[p] for p in ps})
        if all(whole[other] for other, theirs in learning.items() if {*theirs} & {*ps}):
            wanted = [_row(step, call, g, bare, uncorrected, rates) for call, g in _calls(step, name, ps[0]).items()]
            assert [row.call for row in found] == list(range(len(wanted))), name
            for row, numbers in zip(found, wanted, strict=True):
                agree(row, numbers, rel=1e-6)
            assert explains or not found, name
            count += len(found)
        else:
            assert not found or explained[name] or not explains, name
    return count


def _bare(net: Net, *, corrected: bool) -> Net:
    """The same layers without hooks, and without what corrects their gradients."""
    bare = Net().double()
    for own, p in zip(bare.parameters(), net.parameters(), strict=True):
        own.requires_grad_(p.requires_grad)
    if not corrected:
        bare.sample.__class__ = nn.Linear  # type: ignore[assignment]
    return bare


def _gradients(step: Step, bare: Net) -> Values:
    """What the calls add to each parameter's gradient, which the parameters' own values have no part in."""
    sums = {p: torch.zeros_like(p) for p in step.account}
    for p, calls in step.account.items():
        for call, g in calls.items() if p.requires_grad else ():
            leaf = next(leaf for leaf, own in step.net.get_submodule(call.layer).named_parameters() if own is p)
            layer = bare.get_submodule(call.layer)
            sums[p] += torch.autograd.grad(layer(call.x), layer.get_parameter(leaf), g)[0]
    return sums


def _along(gradient: Tensor | None, total: Tensor) -> bool:
    """Whether they differ by a factor alone, as after clipping."""
    gradient = torch.zeros_like(total) if gradient is None else gradient
    lengths = gradient.norm(), total.norm()
    return max(lengths) < 1e-12 or (min(lengths) > 0 and float((gradient * total).sum() / (lengths[0] * lengths[1])) > 1 - 1e-11)


def _calls(step: Step, name: str, p: nn.Parameter) -> dict[Called, Tensor]:
    calls = {call: g for call, g in step.account[p].items() if call.layer == name}
    return dict(sorted(calls.items(), key=lambda entry: entry[0].sequence))


def _same(accounts: list[dict[Called, Tensor]]) -> bool:
    first = accounts[0]
    return all(other.keys() == first.keys() and all(g.equal(first[call]) for call, g in other.items()) for other in accounts)


def _row(step: Step, call: Called, g: Tensor, bare: Net, uncorrected: Values, rates: dict[nn.Parameter, float]) -> oracles.Row:
    real = step.net.get_submodule(call.layer)

    def layer(value: Callable[[nn.Parameter], Tensor]) -> nn.Module:
        version = copy.deepcopy(bare.get_submodule(call.layer))
        for own, p in zip(version.parameters(), real.parameters(), strict=True):
            own.data = value(p) if p in rates else step.before[p]
            own.requires_grad_(p in rates)
        return version

    first = layer(step.before.__getitem__)
    rows = oracles.Call(first, (call.x,), oracles.rows_of_output(first, g), *oracles.rows_of_input(first, call.x, g.shape))
    if not rows.g.any():
        return {"rows": 0}
    moved = rows.moved(first, layer(lambda p: p.detach()))
    moved_plain = rows.moved(first, layer(lambda p: step.before[p] - rates[p] * uncorrected[p]))
    moved_at_1 = rows.moved(first, layer(lambda p: step.before[p] - uncorrected[p]))
    terms, rate = oracles.self_terms(rows), rates[step.net.get_parameter(oracles.learning_name(call.layer, first))]
    row = oracles.of_gram(terms, oracles.multipliers_alone(real, terms), -moved_at_1 - terms.unsqueeze(1) * rows.g, rows.g)
    row |= {f"{key}_plain": value for key, value in oracles.measured(moved_plain, rows.g, rate).items()}
    row |= oracles.measured(moved, rows.g, rate)
    return {name: value for name, value in row.items() if not name.startswith(("below_zero", "multiplier_cv"))}  # rounding where 0
