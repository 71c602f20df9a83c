# What a monitor says: its numbers against the oracle, loss scales, which steps it logs, the file and the tracker.
from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diagnosis_oracles as oracles
import pytest
import torch
from diagnosis_cases import OPTIMISERS, Mlp, agree, bent, rows, sgd, step
from torch import Tensor, nn

import affine_divergence as ad

X = rows(6, 5).float()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> float:
    return step(model, optimizer, x)


def _accumulated(model: nn.Module) -> Tensor:
    parts = rows(5, 5, seed=3), rows(2, 5, seed=4)
    return bent(model(parts[0])) / 2 + bent(model(parts[1])) / 2


def _whole(model: nn.Module) -> Tensor:
    return bent(model(rows(6, 5)))


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _unchanged(_: nn.Module) -> None:
    pass


@pytest.mark.parametrize("optimise", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("between", [_unchanged, _clip], ids=["as it is", "clipped"])
@pytest.mark.parametrize("loss", [_whole, _accumulated], ids=["one batch", "accumulated"])
def test_the_numbers_of_a_step_in_the_middle_of_a_training_are_the_oracles(
    loss: Callable[[nn.Module], Tensor], between: Callable[[nn.Module], None], optimise: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    twin = copy.deepcopy(model)
    optimizer, of_twin = optimise(model), optimise(twin)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            if loss is _accumulated:
                (bent(model(rows(5, 5, seed=3))) / 2).backward()
                (bent(model(rows(2, 5, seed=4))) / 2).backward()
            else:
                loss(model).backward()
            between(model)
            optimizer.step()
            wanted, _ = oracles.diagnosis(twin, of_twin, loss, between)
    found = monitor.last
    assert found is not None
    assert {(row.module, row.call) for row in found.rows} == set(wanted)
    for row in found.rows:
        agree(row, {name: value for name, value in wanted[row.module, row.call].items() if not name.startswith("rank")})
        assert row.rank is None
    assert found.loss is None
    assert not found.counterfactual


def test_clipping_shows_in_the_actual_change_and_not_in_the_plain_one() -> None:
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        optimizer.zero_grad()
        _whole(model).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    assert monitor.last is not None
    assert norm > 0.5
    for row in monitor.last.rows:
        assert row.multiplier_median == pytest.approx(row.multiplier_median_plain * 0.05 / norm, rel=1e-4)
    assert all(check.cosine == pytest.approx(1, abs=1e-9) for check in monitor.last.checks)


def test_without_the_plain_column_its_numbers_are_not_there() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1, plain=False) as monitor:
        _step(model, optimizer)
    assert monitor.last is not None
    for row in monitor.last.rows:
        assert math.isnan(row.multiplier_median_plain)
        assert not math.isnan(row.multiplier_median)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_a_loss_scale_that_the_scaler_tells_changes_no_number(scale: float) -> None:
    torch.manual_seed(0)
    model = Mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = sgd(model)
    twin = copy.deepcopy(model)
    of_twin = sgd(twin)
    with (
        ad.Monitor(model, optimizer, every=1, grad_scaler=scaler) as monitor,
        ad.Monitor(twin, of_twin, every=1) as plain,
    ):
        scaler.scale(bent(model(X))).backward()
        scaler.step(optimizer)
        scaler.update()
        _step(twin, of_twin)
    assert monitor.last is not None
    assert plain.last is not None
    assert len(monitor.last.rows) == 2
    for row, other in zip(monitor.last.rows, plain.last.rows, strict=True):
        expected = {key: value for key, value in vars(other).items() if isinstance(value, float)}
        agree(row, expected, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_step_that_the_scaler_skipped_is_not_taken_for_one(fused: bool, unscaled: bool) -> None:
    torch.manual_seed(0)
    model = Mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    steps: list[int] = []
    with ad.Monitor(model, optimizer, every=2, grad_scaler=scaler, tracker=lambda values, step: steps.append(step)) as monitor:
        for bad in (True, False, False, True, False):
            optimizer.zero_grad()
            loss = bent(model(X))
            scaler.scale(loss * math.inf if bad else loss).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert steps == [0, 2]
    assert monitor.steps == 3
    assert monitor.last is not None
    assert [(row.call, math.isfinite(row.multiplier_median)) for row in monitor.last.rows] == [(0, True), (0, True)]
    assert all(check.ok for check in monitor.last.checks)


def test_whether_a_fused_optimiser_skips_is_asked_at_the_steps_that_would_be_logged_alone() -> None:
    class Asked(torch.optim.RMSprop):  # which itself does not ask
        times = 0

        @property
        def found_inf(self) -> Tensor:
            self.times += 1
            return torch.tensor(0.0)

    model = Mlp()
    optimizer = Asked(model.parameters(), lr=0.1)
    with ad.Monitor(model, optimizer, every=3) as monitor:
        for _ in range(7):
            _step(model, optimizer)
    assert monitor.last is not None
    assert monitor.last.step == 6
    assert optimizer.times == 3


@pytest.mark.parametrize("given", [{}, {"lr": None}], ids=["no rate", "a rate that is made at each step"])
def test_a_group_without_a_learning_rate_has_no_multiplier_and_the_other_numbers_of_its_step(given: dict[str, Any]) -> None:
    class Rateless(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.1 * parameter.grad)

    torch.manual_seed(0)
    model = Mlp()
    twin = copy.deepcopy(model)
    optimizer, of_twin = Rateless(model.parameters(), dict(given)), torch.optim.SGD(twin.parameters(), lr=0.1)
    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(twin, of_twin, every=1) as plain:
        _step(model, optimizer)
        _step(twin, of_twin)
    assert monitor.last is not None
    assert plain.last is not None
    assert monitor.last.about["lr"] == []
    for row, other in zip(monitor.last.rows, plain.last.rows, strict=True):
        assert math.isnan(row.multiplier_median)
        agree(row, {name: getattr(other, name) for name in ("alignment_median", "efficiency", "update_ratio", "interference")}, rel=1e-5)
        assert row.verdict == other.verdict


@pytest.mark.parametrize(("every", "wanted"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (100, [0])])
def test_the_first_step_and_every_nth_after_it_is_logged(every: int, wanted: list[int]) -> None:
    model = Mlp()
    optimizer = sgd(model)
    steps: list[int] = []
    with ad.Monitor(model, optimizer, every=every, tracker=lambda values, step: steps.append(step)) as monitor:
        for _ in range(7):
            _step(model, optimizer)
    assert steps == wanted
    assert monitor.last is not None
    assert monitor.last.step == wanted[-1]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_every_must_be_a_positive_whole_number(every: Any) -> None:
    model = Mlp()
    with pytest.raises((TypeError, ValueError), match="every"):
        ad.Monitor(model, sgd(model), every=every)


def test_a_closure_is_followed() -> None:
    torch.manual_seed(0)
    model = Mlp()
    optimizer = sgd(model)
    twin = copy.deepcopy(model)
    of_twin = sgd(twin)

    def closure() -> float:
        optimizer.zero_grad()
        loss = bent(model(X))
        loss.backward()
        return loss.item()

    with ad.Monitor(model, optimizer, every=1) as monitor, ad.Monitor(twin, of_twin, every=1) as plain:
        for _ in range(2):
            optimizer.step(closure)
            _step(twin, of_twin)
    assert monitor.last is not None
    assert plain.last is not None
    assert repr(monitor.last.rows) == repr(plain.last.rows)


def _parts(diagnosis: Any) -> list[str]:
    return [repr([*value] if isinstance(value, (list, tuple)) else value) for value in vars(diagnosis).values()]


def test_the_file_and_the_tracker_get_what_last_has(tmp_path: Path) -> None:
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(5, 5), nn.Tanh())])
    optimizer = sgd(model)
    told: list[tuple[dict[str, float], int]] = []
    seen = []
    path = tmp_path / "steps.jsonl"
    monitor = ad.Monitor(model, optimizer, every=2, path=path, tracker=lambda values, step: told.append((dict(values), step)))
    with monitor:
        for step in range(5):
            _step(model, optimizer)
            if step % 2 == 0:
                seen.append(_parts(monitor.last))
                assert [_parts(one) for one in ad.diagnostics.load(path)] == seen
    assert [step for _, step in told] == [0, 2, 4]
    for values, _ in told:
        assert 1 <= len(values) <= 12
        assert all(isinstance(name, str) and type(value) is float and math.isfinite(value) for name, value in values.items())
