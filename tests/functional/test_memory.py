# What is kept for the backward, and activation checkpoints, which keep less.
from __future__ import annotations

import weakref

import pytest
import torch
from maps import Map, every_kind, every_map, gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS, D_IN, D_OUT = 32, 16, 24


def _saved(map_: Map, tensors: list[Tensor | None]) -> list[Tensor]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        map_(*tensors)  # type: ignore[arg-type]
    return saved


@every_map
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_saved_for_backward_but_the_inputs(map_: Map, dtype: torch.dtype) -> None:
    tensors = map_.tensors(D_IN, D_OUT, ROWS, dtype=dtype)
    inputs = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    saved = _saved(map_, tensors)
    assert saved
    assert {t.untyped_storage().data_ptr() for t in saved} <= inputs


@every_kind
def test_under_autocast_only_the_rounded_weights_are_saved_besides(map_: Map) -> None:
    tensors = map_.tensors(D_IN, D_OUT, ROWS, dtype=torch.float32)
    inputs = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    with torch.autocast("cpu", torch.bfloat16):
        saved = _saved(map_, tensors)
    beyond = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sum(size for address, size in beyond.items() if address not in inputs) <= 2 * (D_OUT * D_IN + D_OUT)


@every_kind
def test_nothing_is_saved_where_no_gradient_is_wanted(map_: Map) -> None:
    assert _saved(map_, [None if t is None else t.detach() for t in map_.tensors(D_IN, D_OUT, ROWS)]) == []


@every_map
def test_the_output_is_not_kept_for_the_backward(map_: Map) -> None:
    z = map_(*map_.tensors(D_IN, D_OUT, ROWS))
    total, output = z.sum(), weakref.ref(z)
    del z
    assert output() is None
    total.backward()


@every_map
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_through_a_checkpoint_are_bit_identical(map_: Map, use_reentrant: bool) -> None:
    x, weight, bias = map_.tensors(D_IN, D_OUT, ROWS)
    upstream = torch.linspace(-1, 1, ROWS * D_OUT, dtype=torch.float64).reshape(ROWS, D_OUT)
    wanted = gradients(map_(x, weight, bias), upstream, x, weight, bias)
    checkpoint(map_, x, weight, bias, use_reentrant=use_reentrant).backward(upstream)
    for tensor, expected in zip([t for t in (x, weight, bias) if t is not None], wanted, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, expected)
