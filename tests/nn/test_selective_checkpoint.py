# Selective activation checkpointing, which keeps results of operations and raises if a layer then writes into them.
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from layer_cases import LAYERS, cases
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import affine_divergence.nn as ad_nn

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::linear")


def _saves_all(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _saves_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in PRODUCTS else CheckpointPolicy.MUST_RECOMPUTE


def _recomputes_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if operation.name().split(".")[0] in PRODUCTS else CheckpointPolicy.MUST_SAVE


every_layer = pytest.mark.parametrize("name", LAYERS)
policies = pytest.mark.parametrize("policy", [_saves_all, _saves_products, _recomputes_products])


def _equal_through_a_checkpoint(layer: nn.Module, x: Tensor, policy: Any) -> None:
    def region(x: Tensor) -> Tensor:
        z: Tensor = layer(x)
        return z.sin().exp()  # the second saves its result, so that the layer's is computed again

    contexts = partial(create_selective_checkpoint_contexts, policy)
    wanted = region(x)
    z = checkpoint(region, x, use_reentrant=False, context_fn=contexts)
    assert torch.equal(z, wanted)
    of = [x, *layer.parameters()]
    pairs = zip(torch.autograd.grad(z.sum(), of), torch.autograd.grad(wanted.sum(), of), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@policies
@every_layer
def test_selective_checkpoint_gives_bit_identical_gradients(name: str, policy: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for layer, x in cases(name, dtype):
            _equal_through_a_checkpoint(layer, x, policy)


@policies
@pytest.mark.parametrize("groups", [1, 2, 8], ids="groups={}".format)
def test_selective_checkpoint_takes_images_that_are_normalised_in_parts(groups: int, policy: Any) -> None:
    layer = ad_nn.PatchNormConv2d(8, 8, 3, groups=groups, padding=1)
    _equal_through_a_checkpoint(layer, torch.randn(3, 8, 160, 160, requires_grad=True), policy)


@pytest.mark.parametrize("groups", [None, 1, 2], ids=["linear", "conv", "grouped-conv"])
def test_in_place_sum_after_a_layer_is_not_applied_twice(groups: int | None) -> None:
    layer = ad_nn.NormLikeLinear(5, 4).bfloat16() if groups is None else ad_nn.PatchNormConv2d(4, 4, 3, groups=groups)
    x = torch.randn((2, 3, 5) if groups is None else (2, 4, 5, 5), dtype=layer.weight.dtype, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        z: Tensor = layer(x)
        z += 1.0
        return z.sin().exp()

    of = [x, *layer.parameters()]
    wanted = torch.autograd.grad(region(x).sum(), of)
    z = checkpoint(region, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _saves_products))
    assert all(torch.equal(one, other) for one, other in zip(torch.autograd.grad(z.sum(), of), wanted, strict=True))
    # As of torch's own layers, the sum must not overwrite a result that the policy saves.
    z = checkpoint(region, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _saves_all))
    with pytest.raises(RuntimeError, match="has been mutated"):
        z.sum().backward()


class _Keeping(TorchDispatchMode):
    """Keeps the result of every operation, and a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[str, Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.results.append((str(func), tensor, tensor.detach().clone()))
        return result


@every_layer
def test_no_operation_result_changes_under_a_dispatch_mode(name: str) -> None:
    for layer, x in cases(name):
        with _Keeping() as kept:
            torch.autograd.grad(layer(x).sin().sum(), [x, *layer.parameters()])
        for operation, tensor, copy in kept.results:
            assert torch.equal(tensor.nan_to_num(), copy.nan_to_num()), operation
