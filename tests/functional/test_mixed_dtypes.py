# Activations, weights and autocast of different dtypes: the output's dtype is that of F.linear, the gradients' that of their tensors.
from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from maps import Map, every_kind, every_map, gradients
from oracles import TOLERANCE, close

half = [torch.bfloat16, torch.float16]
DTYPES = [*half, torch.float32, torch.float64]
autocasts = pytest.mark.parametrize("autocast", half, ids=str)


@every_map
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [p for p in product(DTYPES, DTYPES) if p[0] != p[1]], ids=str)
def test_mixed_dtypes_outside_autocast_are_promoted(map_: Map, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight, bias = map_.tensors(6, 4, 5, dtype=weight_dtype)
    x = x.detach().to(x_dtype).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    assert z.dtype == torch.promote_types(x_dtype, weight_dtype)
    close(z, expected)
    upstream = torch.linspace(-1, 1, 20).reshape(5, 4).to(z.dtype)
    actual_gradients, wanted_gradients = (gradients(f, upstream.to(f.dtype), x, weight, bias) for f in (z, expected))
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        close(actual, wanted, tolerance=2 * TOLERANCE[actual.dtype])
    assert [g.dtype for g in actual_gradients] == [t.dtype for t in (x, weight, bias) if t is not None]


@every_kind
def test_bfloat16_activations_with_float32_weights_give_float32(map_: Map) -> None:
    x, weight = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3)
    assert map_.function(x, weight).dtype == torch.float32
    assert map_.function(x, weight.bfloat16(), torch.ones(4)).dtype == torch.float32


@every_kind
@autocasts
@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=3)), ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_under_autocast_the_dtype_is_that_of_linear_wherever_linear_accepts_its_arguments(
    map_: Map, autocast: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    x, weight, bias = (None if t is None else t.detach().to(d).requires_grad_() for t, d in zip(map_.tensors(6, 4, 5), dtypes, strict=True))
    with torch.autocast("cpu", autocast):
        try:
            wanted = F.linear(x, weight, bias)  # type: ignore[arg-type]
        except RuntimeError:
            wanted = None  # it refuses float64 beside others; here they are promoted
        z = map_(x, weight, bias)  # type: ignore[arg-type]
    assert z.dtype == (torch.float64 if wanted is None else wanted.dtype)
    close(z, map_.expected(x, weight, bias), tolerance=TOLERANCE[autocast])  # type: ignore[arg-type]
    tensors = [t for t in (x, weight, bias) if t is not None]
    assert [g.dtype for g in torch.autograd.grad(z.sum(), tensors)] == [t.dtype for t in tensors]


@every_map
@autocasts
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_gradients_under_autocast_are_those_of_the_definition(map_: Map, autocast: torch.dtype, inside: bool) -> None:
    x, weight, bias = map_.tensors(16, 8, 12, dtype=torch.float32)
    upstream = torch.linspace(-1, 1, 96).reshape(12, 8).to(autocast)
    with torch.autocast("cpu", autocast):
        z = map_(x, weight, bias)
        if inside:
            actual = gradients(z, upstream, x, weight, bias)
    if not inside:
        actual = gradients(z, upstream, x, weight, bias)
    wanted = gradients(map_.expected(x, weight, bias), upstream.double(), x, weight, bias)
    for tensor, gradient, expected in zip([t for t in (x, weight, bias) if t is not None], actual, wanted, strict=True):
        assert gradient.dtype == tensor.dtype
        close(gradient, expected, tolerance=2 * TOLERANCE[autocast])


@every_kind
@pytest.mark.parametrize("forward", [False, True], ids=["forward-outside", "forward-inside"])
def test_where_the_backward_runs_does_not_change_a_bit_of_the_gradients(map_: Map, forward: bool) -> None:
    # In autocast the products of the backward would be taken in bfloat16.
    x, weight, bias = map_.tensors(16, 8, 12, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        inside, outside = map_(x, weight, bias), map_(x, weight, bias)
    upstream = torch.linspace(-1, 1, 96).reshape(12, 8).to(inside.dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(inside, upstream, x, weight, bias)
    wanted = gradients(outside, upstream, x, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@every_kind
def test_under_autocast_to_float16_the_norm_is_taken_before_the_row_is_rounded(map_: Map) -> None:
    # A float32 row of 1e5 is inf in float16.
    x, weight, bias = map_.tensors(6, 4, 5, dtype=torch.float32)
    x = (1e5 * x.detach()).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        z = map_(x, weight, bias)
    close(z, map_.expected(x, weight, bias))
    upstream = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).half()
    (actual,) = gradients(z, upstream, weight)
    close(actual, gradients(map_.expected(x, weight, bias), upstream.double(), weight)[0], tolerance=TOLERANCE[torch.float16])


@every_kind
def test_a_disabled_autocast_changes_nothing(map_: Map) -> None:
    x, weight, bias = map_.tensors(6, 4, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        z = map_(x, weight, bias)
    assert torch.equal(z, map_(x, weight, bias))


@every_kind
def test_the_map_leaves_autocast_on_for_what_follows(map_: Map) -> None:
    x, weight, bias = map_.tensors(6, 6, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        map_(x, weight, bias)
        assert torch.is_autocast_enabled("cpu")
        assert F.linear(x, weight).dtype == torch.bfloat16
