# What a patch-normalised convolution keeps for its backward, and activation checkpoints, which keep less.
from __future__ import annotations

import weakref

import pytest
import torch
from conv_maps import ConvMap, every_kind, every_map
from maps import gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SIZES = {1: (40,), 2: (9, 10), 3: (4, 5, 6)}


def _saved(map_: ConvMap, tensors: list[Tensor | None]) -> tuple[Tensor, dict[int, int]]:
    """The output, and the bytes of every storage that is kept besides the inputs'."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        z = map_(*tensors)  # type: ignore[arg-type]
    inputs = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return z, {address: size for address, size in kept.items() if address not in inputs}


@every_map
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_tensor_of_the_outputs_size_and_one_map_of_positions_are_kept_besides_the_inputs(map_: ConvMap, dtype: torch.dtype) -> None:
    z, beyond = _saved(map_, map_.tensors(8, *SIZES[map_.dims], dtype=dtype))
    positions = map_.groups * z[:, 0].numel()
    of_map = positions * torch.promote_types(dtype, torch.float32).itemsize
    of_output = z.numel() * dtype.itemsize
    # In float16, whose products are taken in float32, the convolution is made again instead.
    assert sorted(beyond.values()) == sorted([of_map] if dtype == torch.float16 else [of_map, of_output])


@every_map
def test_a_first_layer_whose_image_wants_no_gradient_keeps_the_map_of_positions_alone(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(8, *SIZES[map_.dims])
    z, beyond = _saved(map_, [x.detach(), weight, bias])
    assert list(beyond.values()) == [8 * map_.groups * z[:, 0].numel()]


@every_kind
def test_nothing_is_saved_where_no_gradient_is_wanted(map_: ConvMap) -> None:
    tensors = map_.tensors(8, *SIZES[map_.dims])
    _, beyond = _saved(map_, [None if t is None else t.detach() for t in tensors])
    assert beyond == {}
    with torch.no_grad():
        _, beyond = _saved(map_, tensors)
    assert beyond == {}


@every_map
def test_the_output_is_not_kept_for_the_backward(map_: ConvMap) -> None:
    z = map_(*map_.tensors(2, *SIZES[map_.dims]))
    total, output = z.sum(), weakref.ref(z)
    del z
    assert output() is None
    total.backward()


@every_kind
def test_the_largest_tensor_made_is_far_smaller_than_the_unfolded_image(map_: ConvMap) -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    wide = ConvMap(map_.kind, map_.dims, map_.transposed, (5,) * map_.dims, (4, 4), map_.bias, {"padding": 2})
    tensors = wide.tensors(3, *SIZES[map_.dims])
    with Watch():
        z = wide(*tensors)
        z.sum().backward()
    assert largest <= 2 * 8 * max(z.numel(), *(t.numel() for t in tensors if t is not None))


@every_map
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_through_a_checkpoint_are_bit_identical(map_: ConvMap, use_reentrant: bool) -> None:
    x, weight, bias = map_.tensors(3, *SIZES[map_.dims], dtype=torch.float32)
    z = map_(x, weight, bias)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    wanted = gradients(z, upstream, x, weight, bias)
    checkpoint(map_, x, weight, bias, use_reentrant=use_reentrant).backward(upstream)
    for tensor, expected in zip([t for t in (x, weight, bias) if t is not None], wanted, strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, expected)
