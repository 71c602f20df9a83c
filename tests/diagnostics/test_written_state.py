# What forwards, losses and optimisers write to is had back, wherever they keep it: the loss after the step is of the same beginning.
from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from diagnosis_cases import Mlp, bent, rows
from torch import Tensor, nn

import affine_divergence as ad
from affine_divergence.diagnostics import _held, _inputs

X, Y = rows(6, 4), rows(6, 2, seed=2)
SMALL = 1e-9  # a rate at which the first order is all there is, and whatever else has moved the loss outweighs it by far


def _squares(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean()


def _diagnosed(model: nn.Module, x: Any = X, y: Any = Y, loss_fn: Callable[..., Tensor] = _squares, follows: float = 1.0) -> ad.Diagnosis:
    """By a tiny step, whose loss does what the gradient says, or that share of it."""
    found = ad.diagnose(model, x, y, loss_fn, lr=SMALL)
    assert found.loss is not None
    assert found.loss.predicted < 0
    assert found.loss.realised == pytest.approx(follows * found.loss.predicted, rel=1e-3)
    for step in found.steps:
        assert step.realised == pytest.approx(follows * step.predicted, rel=1e-3), step.kind
    return found


def _values(model: nn.Module) -> list[tuple[int, int, Any]]:
    return [(id(t), t._version, t.detach().to_dense().tolist()) for t in (*model.parameters(), *model.buffers())]


class _Follows(nn.Module):
    """A momentum encoder: a frozen twin that goes a tenth of the way in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 2)
        self.key = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.lerp_(other, 0.1)
        z: Tensor = self.query(x) - self.key(x)
        return z


def test_frozen_parameters_that_a_forward_writes_to_are_as_they_were() -> None:
    model = _Follows().double()
    before = _values(model)
    _diagnosed(model, follows=0.9)  # of the step's change a tenth is the key's too
    assert _values(model) == before


def test_a_frozen_embedding_that_renormalises_itself_is_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.1).requires_grad_(False), nn.Linear(4, 2)).double()
    before = _values(model)
    _diagnosed(model, torch.arange(6))
    assert _values(model) == before


class _Shifts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layer(x.sub_(1.0))
        return z


def _doubles(z: Tensor, y: Tensor) -> Tensor:
    return _squares(z, y.mul_(2.0))


def test_a_batch_that_forward_and_loss_write_to_is_as_it_was() -> None:
    x, y = X.clone(), Y.clone()
    found = _diagnosed(_Shifts().double(), x, y, _doubles)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert (x._version, y._version) == (0, 0)
    assert found.coverage[0].status == "measured"


class _Kept(NamedTuple):
    """What a module holds, what its forward does to it, a number that it makes of it, and how to compare it."""

    make: Callable[[], Any]
    write: Callable[[Any], Any]
    number: Callable[[Any], Any]
    read: Callable[[Any], Any] = repr


class _Notes(nn.Module):
    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.held, self.kept = kept.make(), kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.write(self.held)
        z: Tensor = self.kept.number(self.held) * self.layer(x)
        return z


class _Own:
    """An object of a class of the user's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class _Refuses(list[float]):
    def __setitem__(self, *_: Any) -> None:
        raise TypeError("it grows only")


class _Forbids(collections.OrderedDict[str, float]):
    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("by key only")


class _Attributed(list[float]):
    n: float


def _parent_and_teacher() -> list[nn.Module]:
    teacher = nn.BatchNorm1d(1).double()
    teacher.parent = [teacher]  # type: ignore[assignment]
    return [teacher]


def _read_only() -> np.ndarray[Any, Any]:
    array = np.ones(1)
    array.flags.writeable = False
    return array


KEPT = {
    "deque": _Kept(lambda: collections.deque([1.0], maxlen=2), lambda held: held.append(2.0 * held[-1]), sum),
    "set": _Kept(lambda: {0}, lambda held: held.add(len(held)), len),
    "list in a list": _Kept(lambda: [[1.0]], lambda held: held[0].append(1.0), lambda held: sum(held[0])),
    "dict in a dict": _Kept(lambda: {"a": {"n": 1}}, lambda held: held["a"].update(n=held["a"]["n"] + 1), lambda held: held["a"]["n"]),
    "array": _Kept(lambda: np.ones(1), lambda held: np.add(held, 1.0, out=held), lambda held: float(held[0])),
    "tensor in a list": _Kept(lambda: [torch.ones(())], lambda held: held[0].add_(1.0), lambda held: held[0].item()),
    "generator": _Kept(
        lambda: torch.Generator().manual_seed(5),
        lambda held: None,
        lambda held: torch.rand(6, 1, generator=held, dtype=torch.float64),
        lambda held: held.get_state().tolist(),
    ),
    "numpy's generator": _Kept(
        lambda: np.random.default_rng(5), lambda held: None, lambda held: held.normal(), lambda held: repr(held.bit_generator.state)
    ),
    "numpy's older generator": _Kept(
        lambda: np.random.RandomState(5), lambda held: None, lambda held: held.normal(), lambda held: repr(held.get_state())
    ),
    "python's generator in a dict": _Kept(
        lambda: {"a": random.Random(5)}, lambda held: None, lambda held: held["a"].random(), lambda held: held["a"].getstate()
    ),
    "number of an object": _Kept(
        lambda: types.SimpleNamespace(n=1), lambda held: vars(held).update(n=held.n + 1), lambda held: held.n, lambda held: held.n
    ),
    "tensor of an object of an object": _Kept(
        lambda: _Own(inner=_Own(t=torch.ones(()))),
        lambda held: held.inner.t.add_(1.0),
        lambda held: held.inner.t.item(),
        lambda held: held.inner.t.item(),
    ),
    "list that forbids writes": _Kept(lambda: _Refuses([1.0]), lambda held: held.append(1.0), sum),
    "order of a dict": _Kept(
        lambda: {"a": 1.0, "b": 2.0},
        lambda held: held.update(a=held.pop("a")),
        lambda held: next(iter(held.values())),
        lambda held: list(held.items()),
    ),
    "dict that forbids updates": _Kept(
        lambda: _Forbids(a=1.0, b=2.0),
        lambda held: held.move_to_end(next(iter(held))),
        lambda held: next(iter(held.values())),
        lambda held: list(held.items()),
    ),
    "attribute of a container": _Kept(
        lambda: _Attributed([1.0]),
        lambda held: vars(held).update(n=vars(held).get("n", 0.0) + 1.0),
        lambda held: held.n,
        lambda held: vars(held).copy(),
    ),
    "module in a list": _Kept(
        _parent_and_teacher,
        lambda held: held[0](rows(5, 1)),
        lambda held: 1.0 + held[0].running_var.item(),
        lambda held: held[0].running_var.item(),
    ),
    "what cannot be written to": _Kept(_read_only, lambda held: None, lambda held: float(held[0])),
    "chance itself": _Kept(random.SystemRandom, lambda held: None, lambda held: 1.0 + 0.0 * held.random(), lambda held: ""),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_a_module_holds_and_its_forward_writes_to_is_as_it_was(kept: _Kept) -> None:
    model = _Notes(kept).double()
    held, before = model.held, kept.read(model.held)
    _diagnosed(model)
    assert model.held is held
    assert kept.read(held) == before


class _Graph(nn.Module):
    """Passes messages along the edges of a sparse matrix, which it wears out."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        edges = rows(6, 6, seed=3)
        self.register_buffer("edges", edges.where(edges > 0, 0.0).to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.edges.mul_(0.5) @ self.layer(x)  # type: ignore[operator, union-attr]
        return z


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
def test_a_sparse_buffer_that_a_forward_writes_to_is_as_it_was(layout: torch.layout) -> None:
    model = _Graph(layout)
    before = _values(model)
    _diagnosed(model)
    assert _values(model) == before


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_scripted_part_is_listed_as_skipped_and_all_is_as_it_was() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Sequential(scripted, nn.Linear(4, 2)).double()
    before = _values(model)
    found = _diagnosed(model)
    assert _values(model) == before
    assert [row.module for row in found.rows] == ["1"]
    assert {line.status for line in found.coverage if line.module != "1"} == {"skipped"}
    assert all("ScriptModule" in line.reason for line in found.coverage if line.module == "0.0")


class _Wraps(torch.optim.Optimizer):
    """As optimisers that are sharpness-aware do, it holds the one that steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_an_optimiser_inside_an_optimiser_is_as_it_was(trained: bool) -> None:
    model = Mlp().double()
    optimizer = _Wraps(model.parameters())
    if trained:
        bent(model(rows(6, 5))).backward()
        optimizer.step()
    before = copy.deepcopy(list(optimizer.base.state.values())), list(map(id, optimizer.base.state))
    ad.diagnose(model, rows(6, 5), None, bent, optimizer=optimizer)
    assert list(map(id, optimizer.base.state)) == before[1]
    for now, then in zip(optimizer.base.state.values(), before[0], strict=True):
        assert torch.equal(now["momentum_buffer"], then["momentum_buffer"])


def test_what_an_optimiser_holds_counts_no_change() -> None:
    model = Mlp().double()
    optimizer = torch.optim.Adam(model.parameters())
    bent(model(rows(6, 5))).backward()
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    before = [tensor._version for tensor in held]
    ad.diagnose(model, rows(6, 5), None, bent, optimizer=optimizer)
    assert [tensor._version for tensor in held] == before


class _Lstm(nn.Module):
    """Its weights lie in a list too, as all recurrent layers have one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.head(self.lstm(x.unsqueeze(1))[0].squeeze(1))
        return z


def _beside(keep: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Mlp()
        model.kept = keep(model)
        return model

    return make


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "lstm": _Lstm,
    "list of weights": _beside(lambda model: list(model.parameters())),
    "dict of them in an object": _beside(lambda model: _Own(named=dict(model.named_parameters()))),
    "data of a weight": _beside(lambda model: [p.data for p in model.parameters()]),
    "optimiser": _beside(lambda model: torch.optim.SGD(model.parameters(), lr=SMALL)),
}


@pytest.mark.parametrize("make", BESIDE.values(), ids=BESIDE)
def test_what_steps_is_not_put_back_before_the_loss_is_asked_for_again_wherever_else_it_is_kept(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = X if isinstance(model, _Lstm) else rows(6, 5)
    y = model(x).detach() + rows(*model(x).shape, seed=3)
    before = _values(model)
    _diagnosed(model, x, y)
    assert _values(model) == before


def test_a_trainer_whose_method_is_the_loss_may_hold_model_and_optimiser() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 2).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=SMALL)
            self.counts = _Counts().double()

        def loss(self, z: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.counts(z, y)
            return loss

    trainer = Trainer()
    found = ad.diagnose(trainer.model, X, Y, trainer.loss, optimizer=trainer.optimizer)
    assert found.loss is not None
    assert found.loss.realised == pytest.approx(found.loss.predicted, rel=1e-3)
    assert trainer.counts.seen.item() == 0.0


def _with(**kept: Any) -> nn.Module:
    model = Mlp().double()
    for name, value in kept.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    "model",
    [
        _with(scale=nn.Parameter(torch.ones(1).expand(3), requires_grad=False)),
        _with(sizes=_Refuses([1.0])),
        _with(broadcast=np.broadcast_to(np.float32(0.5), (3,))),
    ],
    ids=["expanded", "refuses", "broadcast"],
)
def test_what_cannot_be_written_to_is_not_where_it_has_not_changed(model: nn.Module) -> None:
    before = _values(model)
    ad.diagnose(model, rows(6, 5), None, bent, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert _values(model) == before


def test_a_buffer_without_values_is_let_be() -> None:
    model = Mlp().double()
    model.register_buffer("mask", torch.ones(3, device="meta"))
    _diagnosed(model, rows(6, 5), None, bent)


def _adds_and_locks(array: np.ndarray[Any, Any]) -> None:
    if array.flags.writeable:
        array += 1.0
        array.flags.writeable = False


def test_what_cannot_be_put_back_is_told_and_all_else_is_put_back() -> None:
    model = _Notes(_Kept(lambda: np.ones(1), _adds_and_locks, lambda held: float(held[0]))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _squares(model.layer(X), Y).backward()
    optimizer.step()
    gradients, before = [p.grad for p in model.parameters()], _values(model)
    with pytest.raises(RuntimeError, match=r"could not be put back to what it was: .*read-only"):
        ad.diagnose(model, X, Y, _squares, optimizer=optimizer)
    assert _values(model) == before
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_a_diagnosis_that_is_finished_is_not_lost_over_what_cannot_be_put_back() -> None:
    forwards = iter(range(9))

    def write(array: np.ndarray[Any, Any]) -> None:
        if next(forwards) == 1:  # the last
            _adds_and_locks(array)

    model = _Notes(_Kept(lambda: np.ones(1), write, lambda held: float(held[0]))).double()
    before = _values(model)
    with pytest.warns(RuntimeWarning, match="could not be put back to what it was") as warned:
        found = ad.diagnose(model, X, Y, _squares, lr=SMALL, counterfactual=False)
    assert found.rows
    assert warned[0].filename == __file__
    assert _values(model) == before


class _Running(nn.Module):
    """A statistic that its forward moves, and a view of it that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.views = [torch.zeros(1, 4, dtype=torch.float64)]
        self.register_buffer("mean", self.views[0])
        self.views.append(self.views[0].expand(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.views[0] += 1.0
        z: Tensor = self.layer(x) * self.views[1].sum()
        return z


def test_an_expanded_view_is_what_it_was_with_its_base() -> None:
    model = _Running()
    model.layer.double()
    _diagnosed(model)
    assert not model.views[0].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: _Own(adjacency=torch.eye(4).to_sparse()),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(4, dtype=torch.complex32),
    ],
    ids=["sparse", "nested", "complex32"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensors_that_cannot_be_compared_are_no_hindrance(make: Callable[[], Any]) -> None:
    _diagnosed(_with(kept=make()), rows(6, 5), None, bent)


def test_the_data_that_objects_hold_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_held, "_LARGEST", 64)
    model = nn.Linear(4, 2)
    model.replay = _Own(rows=torch.zeros(9, dtype=torch.float64), counts=torch.zeros(2))
    before = model.weight.detach().clone()
    held = _held.Held()
    held.look(model)
    model.replay.rows += 1.0  # type: ignore[operator, union-attr]
    model.weight.data += 1.0
    assert held.restore() == []
    assert model.replay.rows.sum() == 9.0  # type: ignore[union-attr]
    assert torch.equal(model.weight, before)


def test_chains_of_any_length_are_followed() -> None:
    model = nn.Linear(4, 2).double()
    model.first = last = _Own()
    for _ in range(3000):
        last.next = last = _Own()
    last.n = 1
    held = _held.Held()
    held.look(model)
    last.n = 2
    assert held.restore() == []
    assert last.n == 1


class _Counts(nn.Module):
    """A loss that is divided by what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.seen += 1.0  # type: ignore[operator]
        return _squares(z, y) / self.seen  # type: ignore[operator]


class _Trainer:
    def __init__(self, counts: _Counts) -> None:
        self.nets, self.calls = {"counts": counts}, 0

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = self.nets["counts"](z, y) * self.calls
        return loss


def _calls(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return loss_fn(z, y) if z.numel() else not_there(z)

    if not callable(loss_fn):
        not_there = loss_fn  # a free variable without a value
    return loss


LOSSES: dict[str, Callable[[_Counts], Callable[..., Tensor]]] = {
    "module": lambda counts: counts,
    "bound method": lambda counts: counts.forward,
    "method": lambda counts: _Trainer(counts).loss,
    "closure": lambda counts: lambda z, y: counts(z, y),
    "function in a closure": lambda counts: _calls(lambda z, y: counts(z, y)),
    "partial": lambda counts: functools.partial(lambda counts, z, y: counts(z, y), counts),
    "partial in a closure": lambda counts: _calls(functools.partial(lambda counts, z, y: counts(z, y), counts)),
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_keeps_is_as_it_was(make: Callable[[_Counts], Callable[..., Tensor]]) -> None:
    counts = _Counts().double()
    _diagnosed(nn.Linear(4, 2).double(), loss_fn=make(counts))
    assert counts.seen.item() == 0.0


# Batches


class _Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


@dataclasses.dataclass(frozen=True)
class _Pair:
    x: Tensor
    named: dict[str, Tensor]


def test_a_batch_keeps_its_classes_and_a_tensor_given_twice_is_one() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, pair: _Pair, again: Tensor) -> Tensor:
            assert pair.x is again
            assert pair.x is not X
            z: Tensor = self.layer(pair.x) + self.layer(pair.named["other"].add_(1.0))
            return z

    other = X.clone()

    def loss(z: Tensor, targets: _Attributes) -> Tensor:
        assert targets.input.data_ptr() != X.data_ptr()
        return _squares(z, targets.y)

    found = ad.diagnose(Model().double(), (_Pair(X, {"other": other}), X), _Attributes(y=Y, input=X), loss, lr=SMALL)
    assert found.loss is not None
    assert found.loss.realised == pytest.approx(found.loss.predicted, rel=1e-3)
    assert torch.equal(other, X)


class _Lazy(dict[str, Tensor]):
    """Makes each tensor when it is asked for it, until it is given another."""

    def __getitem__(self, key: str) -> Tensor:
        value = super().__getitem__(key)
        return value if value.dim() else value.repeat(6)


def test_tensors_that_a_batch_makes_as_it_is_asked_are_not_taken_for_each_other() -> None:
    made = _inputs.copied(_Lazy({str(n): torch.tensor(float(n)) for n in range(50)}))
    assert [made[str(n)].tolist() for n in range(50)] == [[float(n)] * 6 for n in range(50)]


def test_what_cannot_be_drawn_again_is_told() -> None:
    chance = random.SystemRandom()

    def noisy(z: Tensor, y: Tensor) -> Tensor:
        return _squares(z, y) * (1.0 + chance.random())

    model = nn.Linear(4, 2).double()
    noise, none = ad.diagnose(model, X, Y, noisy, lr=SMALL), ad.diagnose(model, X, Y, _squares, lr=SMALL)
    assert noise.loss is not None
    assert none.loss is not None
    assert none.loss.repeated == none.loss.before
    assert noise.loss.repeated != noise.loss.before


# What else there is: the caller's graph, the loss's parameters, hooks that step, other modes, other threads


def test_inputs_in_a_graph_get_no_gradient_and_the_graph_stays() -> None:
    encoder, head = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    z, y = encoder(X), encoder(Y @ rows(2, 4))[:, :2]
    _diagnosed(head, z, y)
    assert encoder.weight.grad is None
    _squares(head(z), y).backward()
    assert encoder.weight.grad is not None


class _Weighs(nn.Module):
    """A loss that learns how much each output counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.weights * (z - y).square()).mean()


@pytest.mark.parametrize("had", [False, True], ids=["without a gradient", "with one"])
def test_a_loss_with_parameters_of_its_own_keeps_its_gradient(had: bool) -> None:
    loss_fn = _Weighs()
    if had:
        loss_fn.weights.grad = torch.full_like(loss_fn.weights, 7.0)
    before = loss_fn.weights.grad
    _diagnosed(nn.Linear(4, 2).double(), loss_fn=loss_fn)
    assert loss_fn.weights.grad is before
    assert before is None or before.tolist() == [7.0, 7.0]


def test_an_optimiser_that_steps_in_the_backward_is_told_and_its_step_is_taken_back() -> None:
    model = nn.Linear(4, 2).double()
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(_: Tensor) -> None:
        other.step()
        other.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    before = [p.tolist() for p in model.parameters()]
    found = ad.diagnose(model, X, Y, _squares)
    assert [p.tolist() for p in model.parameters()] == before
    assert not found.rows
    assert ["was gone when the optimiser stepped" in line.reason for line in found.coverage] == [True]


def test_in_inference_mode_it_says_that_a_step_needs_gradients() -> None:
    model = nn.Linear(4, 2).double()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ad.diagnose(model, X, Y, _squares)
    with torch.inference_mode():
        made_inside = nn.Linear(4, 2).double()
    with pytest.raises(RuntimeError, match="inference_mode"):
        ad.diagnose(made_inside, X, Y, _squares)


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        ad.diagnose(nn.Linear(4, 2, device="meta"), X.float().to("meta"), Y.float().to("meta"), _squares)


def test_two_threads_get_the_numbers_of_one_and_compilation_is_allowed_again() -> None:
    import torch._dynamo.eval_frame as dynamo  # from now on a diagnosis tells it to stand back

    models = [nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Tanh(), nn.Linear(30, 2)).double() for _ in range(2)]

    def told(model: nn.Module) -> str:
        found = ad.diagnose(model, X, Y, _squares, rank=False, counterfactual=False)
        return repr((found.rows, found.loss, found.checks))

    alone = list(map(told, models))
    in_threads: list[list[str]] = [[], []]
    ready = threading.Barrier(2)

    def work(place: int) -> None:
        ready.wait()
        for _ in range(10):
            in_threads[place].append(told(models[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_threads == [[one] * 10 for one in alone]
    assert dynamo._stance.stance == "default"


def test_a_ddp_model_of_a_static_graph_trains_on(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'ddp'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), static_graph=True)
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if net is model:
                ad.diagnose(net, X, Y, _squares, optimizer=optimizer)
            for _ in range(2):
                optimizer.zero_grad()
                _squares(net(X), Y).backward()
                optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    finally:
        torch.distributed.destroy_process_group()
