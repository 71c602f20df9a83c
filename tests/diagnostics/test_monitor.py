# A monitor follows a training without touching it: its bits, its hooks, its copies.
from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosis_cases import OPTIMISERS, Attends, Mlp, bent, convnet, rows, sgd, step
from torch import Tensor, nn

import affine_divergence as ad

X = rows(6, 5).float()


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (Mlp, X),
    "dropout": (_dropout, X),
    "convnet": (convnet, rows(2, 4, 6, 5).float()),
    "attention": (Attends, rows(5, 2, 4).float()),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> float:
    return step(model, optimizer, x)


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    holders = [*model.modules(), optimizer]
    own = sum(len(value) for holder in holders for key, value in vars(holder).items() if key.endswith("_hooks") and value)
    return own + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("optimise", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)
def test_training_with_it_is_bit_identical(make: Callable[[], nn.Module], x: Tensor, optimise: Callable[[nn.Module], Any]) -> None:
    ends: list[list[Tensor]] = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = make()
        optimizer = optimise(model)
        monitor = ad.Monitor(model, optimizer, every=2)
        if watched:
            monitor.attach()
        losses = [_step(model, optimizer, x) for _ in range(5)]
        monitor.detach()
        assert (monitor.last is not None) == watched
        state = [value for of_one in optimizer.state.values() for value in of_one.values() if isinstance(value, Tensor)]
        values = [*model.state_dict().values(), torch.tensor(losses), *state, torch.get_rng_state()]
        ends.append([value.clone() for value in values])
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_hugging_face_training_with_it_is_bit_identical() -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=8
    )
    tokens, ends = torch.randint(0, 40, (2, 6)), []
    for watched in (False, True):
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = ad.Monitor(model, optimizer, every=1)
        if watched:
            monitor.attach()
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
        monitor.detach()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_attached_twice_is_attached_once_and_detached_leaves_no_hook() -> None:
    model = nn.Sequential(Mlp(), nn.MultiheadAttention(4, 2))
    optimizer = sgd(model)
    before = _hooks(model, optimizer)
    monitor = ad.Monitor(model, optimizer)
    assert _hooks(model, optimizer) == before
    monitor.attach()
    once = _hooks(model, optimizer)
    assert once > before
    monitor.attach()
    assert _hooks(model, optimizer) == once
    with monitor:
        assert _hooks(model, optimizer) == once
    assert _hooks(model, optimizer) == before
    monitor.detach()
    assert _hooks(model, optimizer) == before


def test_an_error_in_the_training_leaves_no_hook() -> None:
    model = Mlp()
    optimizer = sgd(model)
    before = _hooks(model, optimizer)
    with pytest.raises(ZeroDivisionError), ad.Monitor(model, optimizer):
        raise ZeroDivisionError
    assert _hooks(model, optimizer) == before


def test_a_detached_monitor_can_be_attached_again_and_goes_on_counting() -> None:
    model = Mlp()
    optimizer = sgd(model)
    steps: list[int] = []
    monitor = ad.Monitor(model, optimizer, every=1, tracker=lambda values, step: steps.append(step))
    for _ in range(2):
        with monitor:
            _step(model, optimizer)
            _step(model, optimizer)
        _step(model, optimizer)
    assert steps == sorted(set(steps))
    assert len(steps) == 4


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_of_an_attached_model_trains_and_does_not_report(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    for make, x in MODELS.values():
        model = make()
        optimizer = sgd(model)
        with ad.Monitor(model, optimizer, every=1) as monitor:
            twin = duplicate(model)
            _step(twin, sgd(twin), x)
            assert monitor.last is None
            _step(model, optimizer, x)
            seen = monitor.last
            assert seen is not None
            twin = duplicate(model)
            _step(twin, sgd(twin), x)
            assert monitor.last is seen


def test_an_attached_model_and_optimiser_are_saved_and_loaded() -> None:
    model = MODELS["attention"][0]()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        _step(model, optimizer, MODELS["attention"][1])
        file = io.BytesIO()
        torch.save(model, file)
        pickle.dumps(optimizer)
        copy.deepcopy(optimizer)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    _step(loaded, sgd(loaded), MODELS["attention"][1])
    assert monitor.last is not None


def test_two_monitors_at_once_see_the_same() -> None:
    model = Mlp()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as first, ad.Monitor(model, optimizer, every=1) as second:
        _step(model, optimizer)
    assert first.last is not None
    assert second.last is not None
    assert repr(first.last.rows) == repr(second.last.rows)


def test_a_diagnosis_in_between_is_not_recorded() -> None:
    torch.manual_seed(0)
    ends = []
    for asked in (False, True):
        torch.manual_seed(0)
        model = Mlp()
        optimizer = sgd(model)
        steps: list[int] = []
        with ad.Monitor(model, optimizer, every=1, tracker=lambda values, step, to=steps: to.append(step)) as monitor:
            optimizer.zero_grad()
            loss = bent(model(X))
            if asked:
                ad.diagnose(model, X, None, bent, optimizer=optimizer)
            loss.backward()
            if asked:
                ad.diagnose(model, X, None, bent, optimizer=optimizer)
            optimizer.step()
            assert len(steps) == 1
            assert monitor.last is not None
            ends.append(repr(monitor.last.rows))
    assert ends[0] == ends[1]


def test_after_an_attention_also_one_that_raised_torch_has_its_own_function_back() -> None:
    plain = nn.functional.linear
    model = Attends()
    optimizer = sgd(model)
    x = MODELS["attention"][1]
    with ad.Monitor(model, optimizer, every=1) as monitor:
        _step(model, optimizer, x)
        assert nn.functional.linear is plain
        assert monitor.last is not None
        assert len(monitor.last.rows) == 6
    with ad.Monitor(model, optimizer, every=1), pytest.raises((AssertionError, RuntimeError)):
        model.attention(x, x[:, :1], x)
    assert nn.functional.linear is plain
