# Two processes with a process_group are one batch: under DistributedDataParallel, with uneven parts, compiled; without one they are two.
from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batch_ranks import CASES, arguments_of_functions, layer_and_batches, loss, spawned
from oracles import close

from affine_divergence.gradient import batch_corrected_conv2d, batch_corrected_linear
from affine_divergence.nn import BatchCorrectedLinear

cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawned(tmp_path_factory.mktemp("group"))


@cases
def test_two_halves_of_a_batch_under_ddp_are_the_whole_batch_of_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    layer, batches = layer_and_batches(case)
    for step, batch in enumerate(batches):
        layer.zero_grad()
        loss(layer(batch)).backward()
        for rank in ranks:
            gradients, share = rank["halves"][case][step]
            for actual, parameter in zip(gradients, layer.parameters(), strict=True):
                close(actual, parameter.grad, tolerance=1e-10)
            close(share, layer.realised_share)


@cases
def test_what_uneven_parts_contribute_adds_up_to_the_whole_batch_of_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    layer, batches = layer_and_batches(case)
    for step, batch in enumerate(batches):
        layer.zero_grad()
        layer(batch).sin().sum().backward()
        for index, parameter in enumerate(layer.parameters()):
            close(sum(rank["uneven"][case][step][index] for rank in ranks), parameter.grad, tolerance=1e-10)  # type: ignore[arg-type]
    assert not any(gradient.any() for gradient in ranks[1]["uneven"][case][-1])  # it had no rows


def test_the_functions_take_a_group_as_the_layers_do(ranks: list[dict[str, Any]]) -> None:
    x, weight, image, kernel = arguments_of_functions()
    batch_corrected_linear(x, weight).cos().sum().backward()
    batch_corrected_conv2d(image, kernel).cos().sum().backward()
    for index, gradient in enumerate((weight.grad, kernel.grad)):
        close(sum(rank["function"][index] for rank in ranks), gradient, tolerance=1e-10)  # type: ignore[arg-type]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_a_group_nothing_is_communicated(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def watched(name: str, function: Any) -> Any:
        return lambda *a, **k: (called.append(name), function(*a, **k))[1]

    for name in dir(dist):
        if name.startswith(("all_", "broadcast", "gather", "reduce_scatter", "scatter", "barrier", "send")):
            monkeypatch.setattr(dist, name, watched(name, getattr(dist, name)))
    for group, wanted in ((None, set()), (alone, {"all_gather", "all_reduce"})):
        for case in CASES:
            layer, batches = layer_and_batches(case)
            layer.process_group = group
            layer(batches[0]).sum().backward()
        assert set(called) == wanted
    assert called.count("all_gather") == len(CASES) + 2 * 2  # the numbers of rows; x and g of two dual forms
    assert called.count("all_reduce") == len(CASES) - 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, of every Function that it compiles
def test_a_compiled_layer_talks_to_its_group(alone: Any) -> None:
    torch._dynamo.reset()
    for case in ("convolution, dual", "linear, average"):
        layer, batches = layer_and_batches(case)
        plain = copy.deepcopy(layer)
        layer.process_group = alone
        for model in (torch.compile(layer, fullgraph=True, backend="aot_eager"), plain):
            loss(model(batches[0])).backward()
        for actual, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
            close(actual.grad, wanted.grad, tolerance=1e-10)
        close(layer.realised_share, plain.realised_share)


def test_a_compiled_function_with_a_group_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"torch.compile cannot trace a process_group here; take the layer"):
        batch_corrected_linear(torch.ones(2, 3), torch.ones(1, 3), process_group=object())  # type: ignore[arg-type]


def test_copies_share_the_group_and_pickles_are_refused_with_the_way_out(alone: Any) -> None:
    layer = BatchCorrectedLinear(3, 2, process_group=alone)
    shown = "BatchCorrectedLinear(in_features=3, out_features=2, bias=True, damping=0.001)"
    assert layer.process_group is copy.deepcopy(layer).process_group is alone
    assert repr(layer) == shown.removesuffix(")") + ", process_group=1 processes)"
    with pytest.raises(TypeError, match=r"belongs to the running processes; save the state_dict, or set layer.process_group = None"):
        pickle.dumps(layer)
    layer.process_group = None
    assert repr(pickle.loads(pickle.dumps(layer))) == shown
