# Where 16 bits overflow, flush to zero or lose the "+1", and where dtypes are mixed: the values are right all the same.
from __future__ import annotations

from itertools import product

import pytest
import torch
from conv_maps import PLAIN, ConvMap, every_kind, every_map
from maps import gradients
from oracles import FLOAT32_EPS, TOLERANCE, close
from torch import Tensor

import affine_divergence.functional as AF

half = [torch.bfloat16, torch.float16]
DTYPES = [*half, torch.float32, torch.float64]
SIZES = {1: (6,), 2: (4, 5), 3: (2, 3, 3)}
both = pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
directions = pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])


def _one_position(
    kind: str, transposed: bool, channels: int, dtype: torch.dtype, bias: bool = False
) -> tuple[ConvMap, list[Tensor | None]]:
    """A map from `channels` inputs to one position, with weights of 1."""
    map_ = ConvMap(kind, 2, transposed, (1, 1) if transposed else (2, 2), (channels, 1) if transposed else (channels // 4, 1), bias)
    tensors = map_.tensors(1, *((1, 1) if transposed else (2, 2)), dtype=dtype)
    return map_, [None if t is None else torch.full_like(t, float(t.dim() == 4)).requires_grad_() for t in tensors]


@both
@directions
def test_in_float16_a_patch_whose_sum_of_squares_overflows_is_not_zero(kind: str, transposed: bool) -> None:
    # 8 · 100² = 80,000 is above float16's 65,504. The truth is about √8.
    map_, (x, weight, _) = _one_position(kind, transposed, 8, torch.float16)
    assert x is not None
    assert weight is not None
    close(map_(100 * x, weight).flatten(), torch.tensor([8**0.5], dtype=torch.float64))


@both
@directions
@pytest.mark.parametrize("bias", [True, False])
def test_in_float16_the_product_may_overflow_before_it_is_scaled(kind: str, transposed: bool, bias: bool) -> None:
    # W·patch = 153,600; z = √512 = 22.6.
    map_, (x, weight, shift) = _one_position(kind, transposed, 512, torch.float16, bias)
    assert x is not None
    assert weight is not None
    close(map_(300 * x, weight, shift).flatten(), torch.tensor([512**0.5], dtype=torch.float64))


@both
def test_in_float16_a_dark_patch_beside_a_bright_one_keeps_its_digits(kind: str) -> None:
    # A power of two for the whole image, which keeps the bright patch below 65,504, would flush the dark one.
    map_ = ConvMap(kind, 1, False, (4,), (8, 3), geometry={"stride": 4})
    x, weight, bias = map_.tensors(1, 8, dtype=torch.float16)
    x = x.detach()
    x[..., :4] *= 2e4
    x[..., 4:] *= 1e-4
    z, expected = map_(x, weight, bias.detach().zero_()), map_.expected(x, weight, bias)
    for position in (0, 1):
        close(z[..., position], expected[..., position])


@every_map
@pytest.mark.parametrize("length", [1e-4, 300.0])
def test_in_float16_long_and_short_patches_have_the_gradients_of_the_definition(map_: ConvMap, length: float) -> None:
    # W·patch and t·g leave float16's range at both ends.
    if map_.options.get("eps") == 0.0 and length < 1:
        pytest.skip("gradients of 1e4 times those of the output")
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=torch.float16)
    x = (length * x.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    close(z, expected)
    upstream = 1e-3 * torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).half()
    for actual, wanted in zip(
        gradients(z, upstream, x, weight, bias), gradients(expected, upstream.double(), x, weight, bias), strict=True
    ):
        step = 2.0**-24 / TOLERANCE[torch.float16]  # float16's smallest
        close(actual, wanted, tolerance=2 * TOLERANCE[torch.float16], scale=float(wanted.abs().max()) + step)


@both
def test_in_float16_small_gradients_of_long_patches_are_not_flushed_to_zero(kind: str) -> None:
    map_ = ConvMap(kind, 2, False, (2, 2), (4, 3), geometry={"padding": 1})
    x, weight, bias = map_.tensors(1, 3, 3, dtype=torch.float16)
    x = (250 * x.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    upstream = torch.full_like(z, 1e-5)
    (actual,), (wanted,) = (gradients(f, upstream.to(f.dtype), weight) for f in (z, expected))
    assert actual.abs().max() > 0
    close(actual, wanted, scale=float(wanted.abs().max()) + 2.0**-24 / TOLERANCE[torch.float16])


def test_in_bfloat16_the_one_under_the_root_counts_and_small_values_add_up() -> None:
    x, weight = torch.full((1, 1, 64, 64), 2.0**-6).bfloat16(), torch.zeros(1, 1, 64, 64).bfloat16()
    weight[0, 0, 0, 0] = 64.0
    close(AF.affine_like_conv2d(x, weight).flatten(), torch.tensor([0.5**0.5], dtype=torch.float64), tolerance=2.0**-8)
    close(AF.norm_like_conv2d(x, weight).flatten(), torch.tensor([1.0], dtype=torch.float64), tolerance=2.0**-8)


@every_kind
@pytest.mark.parametrize("dtype", half, ids=str)
@pytest.mark.parametrize("length", [1e-3, 1.0, 30.0])
def test_a_model_in_sixteen_bits_agrees_with_itself_in_float32(map_: ConvMap, dtype: torch.dtype, length: float) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    x = (length * x).detach()
    widened = [None if t is None else t.detach().float() for t in (x, weight, bias)]
    close(map_(x, weight, bias), map_(*widened))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("value", [1e-12, 1e12, 1e17])
def test_float32_patches_of_extreme_length_give_the_definition(kind: str, value: float) -> None:
    map_ = ConvMap(kind, 2, False, (2, 2), (3, 2), geometry={"padding": 1})
    x, weight, bias = map_.tensors(1, 3, 3, dtype=torch.float32)
    x = (value * x.detach()).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    close(z, expected)
    upstream = torch.ones_like(z)
    for actual, wanted in zip(gradients(z, upstream, x, weight), gradients(expected, upstream.double(), x, weight), strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("length", [1e-18, 1e-16, 1e-8])
def test_a_norm_like_patch_without_eps_has_its_gradient_however_short_it_is(length: float) -> None:
    map_ = ConvMap("norm-like", 1, False, (2,), (2, 3), False, options={"eps": 0.0})
    x, weight, _ = map_.tensors(1, 2, dtype=torch.float32)
    x = (length * x.detach()).requires_grad_()
    (actual,), (wanted,) = (gradients(f, torch.ones_like(f), x) for f in (map_(x, weight), map_.expected(x, weight)))
    close(actual, wanted, tolerance=1e-5)


@both
def test_a_patch_whose_squared_norm_overflows_gives_zero_and_does_not_spoil_its_neighbours(kind: str) -> None:
    map_ = ConvMap(kind, 1, False, (2,), (1, 3), False, geometry={"stride": 2})
    x, weight, _ = map_.tensors(1, 6, dtype=torch.float32)
    spoilt = x.detach().clone()
    spoilt[0, 0, 2] = 1e20
    z = map_(spoilt, weight)
    assert not z[..., 1].any()
    close(z[..., [0, 2]], map_(x, weight)[..., [0, 2]].detach())


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_pixel_spoils_the_patches_that_see_it_and_no_others(map_: ConvMap, bad: float) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims])
    spoilt = x.detach().clone()
    spoilt[(1, 0, *(n // 2 for n in SIZES[map_.dims]))] = bad
    z, wanted = map_(spoilt, weight, bias), map_(x, weight, bias)
    sees = map_.patches(spoilt).isfinite().logical_not().flatten(1, 2).any(1, keepdim=True).expand_as(z)
    assert sees.any()
    close(z[~sees], wanted[~sees])


def test_the_eps_of_none_is_float32s_in_every_dtype() -> None:
    for dtype in TOLERANCE:
        x = torch.full((1, 1, 1), 2.0**-12, dtype=dtype)
        wanted = 2.0**-12 / (2.0**-24 + FLOAT32_EPS) ** 0.5
        close(AF.norm_like_conv1d(x, torch.ones(1, 1, 1, dtype=dtype)), torch.tensor([[[wanted]]], dtype=torch.float64))


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [p for p in product(DTYPES, DTYPES) if p[0] != p[1]], ids=str)
def test_mixed_dtypes_outside_autocast_are_promoted(map_: ConvMap, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=weight_dtype)
    x = x.detach().to(x_dtype).requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    assert z.dtype == torch.promote_types(x_dtype, weight_dtype)
    close(z, expected)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z.dtype)
    actual_gradients = gradients(z, upstream, x, weight, bias)
    for actual, wanted in zip(actual_gradients, gradients(expected, upstream.double(), x, weight, bias), strict=True):
        close(actual, wanted, tolerance=2 * TOLERANCE[actual.dtype])
    assert [g.dtype for g in actual_gradients] == [t.dtype for t in (x, weight, bias)]


@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias and m.dims == 2], ids=str)
@pytest.mark.parametrize("autocast", half, ids=str)
@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=3)), ids=lambda dtypes: "-".join(str(d)[6:] for d in dtypes))
def test_under_autocast_the_dtype_is_that_of_torchs_convolution_and_float64_wherever_one_of_its_arguments_is(
    map_: ConvMap, autocast: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    x, weight, bias = (t.detach().to(d).requires_grad_() for t, d in zip(map_.tensors(2, 4, 5), dtypes, strict=True))
    plain = torch.nn.functional.conv_transpose2d if map_.transposed else torch.nn.functional.conv2d
    with torch.autocast("cpu", autocast):
        # Beside others torch refuses float64, or rounds a bias of it: that depends on the CPU.
        wanted = torch.float64 if torch.float64 in dtypes else plain(x, weight, bias, **map_.geometry).dtype
        z = map_(x, weight, bias)
    assert z.dtype == wanted
    close(z, map_.expected(x, weight, bias), tolerance=TOLERANCE[autocast])
    assert [g.dtype for g in torch.autograd.grad(z.sum(), [x, weight, bias])] == list(dtypes)


@every_kind
@pytest.mark.parametrize("autocast", half, ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_gradients_under_autocast_are_those_of_the_definition(map_: ConvMap, autocast: torch.dtype, inside: bool) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=torch.float32)
    with torch.autocast("cpu", autocast):
        z = map_(x, weight, bias)
        upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(autocast)
        if inside:
            actual_gradients = gradients(z, upstream, x, weight, bias)
    if not inside:
        actual_gradients = gradients(z, upstream, x, weight, bias)
    wanted_gradients = gradients(map_.expected(x, weight, bias), upstream.double(), x, weight, bias)
    for actual, wanted in zip(actual_gradients, wanted_gradients, strict=True):
        assert actual.dtype == torch.float32
        close(actual, wanted, tolerance=2 * TOLERANCE[autocast])


@every_kind
def test_where_the_backward_runs_does_not_change_a_bit_of_the_gradients(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=torch.float32)
    for forward in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            inside, outside = map_(x, weight, bias), map_(x, weight, bias)
        upstream = torch.randn(inside.shape, generator=torch.Generator().manual_seed(1)).to(inside.dtype)
        with torch.autocast("cpu", torch.bfloat16):
            actual = gradients(inside, upstream, x, weight, bias)
        wanted = gradients(outside, upstream, x, weight, bias)
        assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@every_kind
def test_under_autocast_to_float16_the_norm_is_taken_before_the_image_is_rounded(map_: ConvMap) -> None:
    # A float32 value of 1e5 is inf in float16.
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=torch.float32)
    x = (1e5 * x.detach()).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        z = map_(x, weight, bias)
    close(z, map_.expected(x, weight, bias))
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).half()
    (actual,) = gradients(z, upstream, weight)
    close(actual, gradients(map_.expected(x, weight, bias), upstream.double(), weight)[0], tolerance=TOLERANCE[torch.float16])


@every_kind
def test_a_disabled_autocast_changes_nothing_and_an_enabled_one_stays_on(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        map_(x, weight, bias)
        assert torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            z = map_(x, weight, bias)
    assert torch.equal(z, map_(x, weight, bias))
