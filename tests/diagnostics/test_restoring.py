# A diagnosis leaves everything as it was: parameters, gradients, buffers, optimiser, random numbers, flags, hooks; also when it fails.
from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diagnosis_cases import OPTIMISERS
from torch import Tensor, nn

import affine_divergence as ad

X = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LOSS = nn.functional.cross_entropy


def _net() -> nn.Sequential:
    """Statistics that a forward moves, masks that it draws, a part that is frozen and one that is in eval mode."""
    body = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(27, 6), nn.ReLU(), nn.Linear(6, 3))
    net[5].eval()
    net[4].weight.requires_grad_(False)
    net[9].register_forward_hook(lambda *_: None)
    return net


def _copied(value: Any) -> Any:
    """A copy in which tensors are beside their values, to be compared as the objects that they are and by what they hold."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, value.detach().clone()
    if isinstance(value, dict):
        return [(id(key) if isinstance(key, Tensor) else key, _copied(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """All that a user could notice."""
    parts: list[Any] = [_copied(dict(model.named_parameters())), [_copied(p.grad) for p in model.parameters()]]
    parts += [_copied(dict(model.named_buffers())), [module.training for module in model.modules()]]
    parts += [[(k, len(v)) for k, v in vars(module).items() if k.endswith("_hooks")] for module in model.modules()]
    parts += [[sorted(vars(module)) for module in model.modules()], [len(p._backward_hooks or ()) for p in model.parameters()]]
    parts += [[t._version for t in (*model.parameters(), *model.buffers())]]
    parts += [torch.get_rng_state().numpy().tobytes(), random.getstate(), _copied(np.random.get_state())]
    parts += [torch.is_grad_enabled(), torch.get_default_dtype()]
    if optimizer is not None:
        own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        parts += [_copied(dict(optimizer.state)), _copied(optimizer.param_groups), sorted(own), _copied(own)]
        parts += [{key: len(value) for key, value in own.items() if key.endswith("_hooks")}]
    return parts


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _assert_same(before: list[Any], after: list[Any]) -> None:
    changed = [(part, old, new) for part, (old, new) in enumerate(zip(before, after, strict=True)) if not _equal(old, new)]
    assert not changed, str(changed)[:1000]


def _trained(optimise: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in the middle of its training, with gradients left of the last step on some parameters."""
    torch.manual_seed(0)
    model = _net()
    optimizer = optimise(model)
    for _ in range(2):
        optimizer.zero_grad()
        LOSS(model(X), Y).backward()
        optimizer.step()
    model[9].bias.grad = None
    return model, optimizer


every_optimiser = pytest.mark.parametrize("optimise", OPTIMISERS.values(), ids=OPTIMISERS)


@every_optimiser
def test_all_is_as_it_was(optimise: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model, optimizer = _trained(optimise)
    before = _state(model, optimizer)
    found = ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))
    assert {row.module for row in found.rows} == {"0", "4", "7", "9"}


@every_optimiser
def test_training_goes_on_as_if_nothing_had_been_asked(optimise: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    ends = []
    for asked in (False, True):
        model, optimizer = _trained(optimise)
        for _ in range(2):
            if asked:
                ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
            optimizer.zero_grad()
            LOSS(model(X), Y).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()])
    assert _equal(*ends)


@every_optimiser
def test_an_optimiser_that_has_not_stepped_yet_has_no_state_afterwards(optimise: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = _net()
    optimizer = optimise(model)
    before = _state(model, optimizer)
    ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


def test_lbfgs_which_wants_a_closure_is_diagnosed_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = _net().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = LOSS(model(X), Y)
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    before = _state(model, optimizer)
    found = ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))
    assert found.loss is not None
    optimizer.step(closure)
    with torch.no_grad():
        assert LOSS(model(X), Y).item() == pytest.approx(found.loss.after, rel=1e-6)


def test_a_scheduler_and_a_scheduled_rate_stay_and_the_rate_counts() -> None:
    model, optimizer = _trained(OPTIMISERS["adam"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    before = _state(model, optimizer), copy.deepcopy(scheduler.state_dict())
    ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
    _assert_same(before[0], _state(model, optimizer))
    assert scheduler.state_dict() == before[1]
    optimizer.step()
    scheduler.step()  # says so if it thinks that no step came before
    assert scheduler.get_last_lr() == [0.0025]


def test_a_model_without_an_optimiser_is_left_as_it_was() -> None:
    model = _net()
    before = _state(model)
    ad.diagnose(model, X, Y, LOSS)
    _assert_same(before, _state(model))


def _raising(*_: Any) -> Tensor:
    raise ZeroDivisionError("of the user's own")


class _Fails(torch.optim.SGD):
    """Steps half of the way."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        raise ZeroDivisionError("of the user's own")


def test_when_the_loss_raises_all_is_as_it_was() -> None:
    model, optimizer = _trained(OPTIMISERS["adam"])
    before = _state(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        ad.diagnose(model, X, Y, _raising, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))


def test_when_the_second_loss_raises_all_is_as_it_was() -> None:
    model, optimizer = _trained(OPTIMISERS["adam"])
    calls = []

    def loss(z: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return LOSS(z, y) if len(calls) == 1 else _raising()

    before = _state(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        ad.diagnose(model, X, Y, loss, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))


def test_when_the_optimiser_raises_all_is_as_it_was() -> None:
    model, _ = _trained(OPTIMISERS["adam"])
    optimizer = _Fails(model.parameters(), lr=0.1, momentum=0.9)
    before = _state(model, optimizer)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        ad.diagnose(model, X, Y, LOSS, optimizer=optimizer)
    _assert_same(before, _state(model, optimizer))


def test_when_a_layer_raises_no_hook_stays() -> None:
    model = _net()
    handle = model[8].register_forward_hook(lambda *_: _raising())
    before = _state(model)
    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        ad.diagnose(model, X, Y, LOSS)
    _assert_same(before, _state(model))
    handle.remove()


def test_asked_twice_the_answer_is_the_same() -> None:
    model, optimizer = _trained(OPTIMISERS["momentum"])
    first, second = (ad.diagnose(model, X, Y, LOSS, optimizer=optimizer) for _ in range(2))
    assert str(first) == str(second)
    assert repr(first.rows) == repr(second.rows)
    assert repr((first.loss, first.checks, first.counterfactual, first.steps)) == repr(
        (second.loss, second.checks, second.counterfactual, second.steps)
    )


def test_the_losses_before_and_after_the_step_are_of_the_same_dropout_masks_and_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 400), nn.Dropout(0.5), nn.ReLU(), nn.Linear(400, 3))
    x = torch.randn(4, 5)
    found = ad.diagnose(model, x, Y[:4], LOSS, lr=1e-4)
    assert found.loss is not None
    assert found.loss.before == pytest.approx(LOSS(model(x), Y[:4]).item(), rel=1e-6)  # the masks that the next forward draws
    assert found.loss.realised == pytest.approx(found.loss.predicted, rel=0.05)


def test_the_training_flag_decides_what_is_diagnosed() -> None:
    torch.manual_seed(0)
    model = _net().eval()
    before = _state(model)
    found = ad.diagnose(model, X, Y, LOSS, lr=0.01)
    _assert_same(before, _state(model))
    assert found.loss is not None
    with torch.no_grad():
        assert found.loss.before == pytest.approx(LOSS(model(X), Y).item(), rel=1e-6)


def test_inputs_are_left_as_they_were_also_those_that_ask_for_a_gradient() -> None:
    model, x = _net(), X.clone().requires_grad_()
    for before in (None, torch.ones_like(x)):
        x.grad = before
        ad.diagnose(model, (x,), Y, LOSS)
        assert x.grad is before
        assert torch.equal(x, X)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_it_works_where_gradients_are_off_and_leaves_them_off() -> None:
    model = _net()
    with torch.no_grad():
        found = ad.diagnose(model, X, Y, LOSS)
        assert not torch.is_grad_enabled()
    assert len(found.rows) == 4


class _Keeps(nn.Module):
    """Notes its calls, as people's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.shapes: list[Any] = ["none"]
        self.seen: dict[str, Any] = {"calls": 0}
        self.calls = 0
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(x.shape)
        self.seen["calls"] += 1
        self.seen[f"call {self.calls}"] = x
        self.calls += 1
        self.latest = x
        out: Tensor = self.layer(x)
        return out


def test_what_a_model_notes_of_its_calls_is_as_it_was() -> None:
    model = _Keeps()
    kept = model.shapes, model.seen
    ad.diagnose(model, X[:, 0, 0], Y, LOSS)
    assert kept == (["none"], {"calls": 0})
    assert model.shapes is kept[0]
    assert model.seen is kept[1]
    assert (model.calls, model.latest) == (0, None)
