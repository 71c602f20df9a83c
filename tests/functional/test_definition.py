# Values and gradients are those of the definition, for every option, dtype and shape.
from __future__ import annotations

import pytest
import torch
from maps import Map, every_map, gradients
from oracles import TOLERANCE, close

SHAPES = {
    "one-row": (),
    "rows": (5,),
    "no-rows": (0,),
    "batches": (2, 3),
    "empty-batches": (2, 0),
    "no-batches": (0, 3),
    "images": (2, 1, 3),
}


@every_map
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_those_of_the_definition(map_: Map, shape: tuple[int, ...]) -> None:
    x, weight, bias = map_.tensors(4, 3, *shape)
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    close(z, expected)
    upstream = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1))
    for actual, wanted in zip(gradients(z, upstream, x, weight, bias), gradients(expected, upstream, x, weight, bias), strict=True):
        close(actual, wanted)


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("d_in", "d_out"), [(3, 40), (40, 3)], ids=["widening", "narrowing"])
def test_every_dtype_gives_the_definition_within_its_rounding(map_: Map, dtype: torch.dtype, d_in: int, d_out: int) -> None:
    x, weight, bias = map_.tensors(d_in, d_out, 6, dtype=dtype)
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    assert z.dtype == dtype
    close(z, expected)
    upstream = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted_gradients = gradients(expected, upstream.double(), x, weight, bias)
    for actual, wanted in zip(gradients(z, upstream, x, weight, bias), wanted_gradients, strict=True):
        assert actual.dtype == dtype
        close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@every_map
@pytest.mark.parametrize(("d_in", "d_out"), [(1, 1), (1, 3), (3, 1), (0, 3), (3, 0)])
def test_narrow_and_empty_layers_give_the_definition(map_: Map, d_in: int, d_out: int) -> None:
    x, weight, bias = map_.tensors(d_in, d_out, 4)
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    close(z, expected)
    wanted_gradients = gradients(expected, torch.ones_like(z), x, weight, bias)
    for actual, wanted in zip(gradients(z, torch.ones_like(z), x, weight, bias), wanted_gradients, strict=True):
        close(actual, wanted, scale=1.0)  # with d_in = 1 the gradient of a normalised x is a difference of equals


@every_map
def test_only_the_gradients_asked_for_are_made(map_: Map) -> None:
    tensors = [t for t in map_.tensors(4, 3, 5) if t is not None]
    everything = gradients(map_(*tensors), torch.ones(5, 3, dtype=torch.float64), *tensors)
    for index, tensor in enumerate(tensors):
        asked = [t.detach().requires_grad_(t is tensor) for t in tensors]
        (alone,) = gradients(map_(*asked), torch.ones(5, 3, dtype=torch.float64), asked[index])
        assert torch.equal(alone, everything[index])
        assert [t.grad for t in asked] == [None] * len(asked)
