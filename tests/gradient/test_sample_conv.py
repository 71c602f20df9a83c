# The sample correction of convolutions against their patches written out, over a generated table of geometries.
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_maps import SIZES, TABLE, ConvMap
from conv_oracles import vectors
from oracles import TOLERANCE, close
from sample_oracles import interference, sample_gradients
from torch import Tensor

from affine_divergence import gradient

PLAIN = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CORRECTED = {dims: getattr(gradient, f"sample_corrected_conv{dims}d") for dims in PLAIN}
# Every geometry of torch's convolutions twice, with and without a bias as they were drawn.
GEOMETRIES = [m for m in TABLE if not m.transposed]
every_geometry = pytest.mark.parametrize("map_", GEOMETRIES, ids=lambda m: str(m).partition("-like-")[2])
SOME = [
    ConvMap("", 1, False, (4,), (3, 4), geometry={"stride": 2, "padding": 1}),
    ConvMap("", 2, False, (3, 2), (4, 6), geometry={"padding": "same", "groups": 2}),
    ConvMap("", 2, False, (3, 3), (4, 8), geometry={"padding": 1, "dilation": 2, "groups": 4}),
    ConvMap("", 3, False, (2, 2, 1), (2, 3)),
]
every_kind = pytest.mark.parametrize("map_", SOME, ids=str)


def _corrected(map_: ConvMap, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z: Tensor = CORRECTED[map_.dims](x, weight, bias, **map_.geometry)
    return z


def _plain(map_: ConvMap, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return PLAIN[map_.dims](x, weight, bias, **map_.geometry)  # type: ignore[operator, no-any-return]


def _rows(map_: ConvMap, images: Tensor) -> Tensor:
    """(N, C, *out) → (groups, images and positions, C/groups)."""
    return images.flatten(2).unflatten(1, (map_.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def _patches(map_: ConvMap, x: Tensor) -> Tensor:
    """(groups, images and positions, C/groups·taps)."""
    return vectors(map_.patches(x.detach()), map_.groups).transpose(0, 1).flatten(1, 2)


def _wanted(map_: ConvMap, g: Tensor, x: Tensor, learns: tuple[bool, bool]) -> list[Tensor]:
    if x.dim() < map_.dims + 2:
        g, x = g.unsqueeze(0), x.unsqueeze(0)
    groups = [sample_gradients(*rows, learns) for rows in zip(_rows(map_, g), _patches(map_, x), strict=True)]
    weight_grad, bias_grad = (torch.cat(each) for each in zip(*groups, strict=True))
    c_in, c_out = map_.channels
    both = weight_grad.view(c_out, c_in // map_.groups, *map_.kernel), bias_grad
    return [t for t, learning in zip(both, learns, strict=True) if learning]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # torch's own
@every_geometry
def test_every_positions_part_is_divided_by_the_squared_norm_of_its_patch(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims])
    learning = [p for p in (weight, bias) if p is not None]
    z, plain = _corrected(map_, x, weight, bias), _plain(map_, x, weight, bias)
    assert torch.equal(z, plain)
    upstream = torch.randn(z.shape, dtype=z.dtype)
    x_grad, *gradients = torch.autograd.grad(z, [x, *learning], upstream)
    assert torch.equal(x_grad, torch.autograd.grad(plain, x, upstream)[0])
    for actual, wanted in zip(gradients, _wanted(map_, upstream, x, (True, map_.bias)), strict=True):
        close(actual, wanted)


@every_kind
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True)], ids=["both", "weight", "bias"])
@pytest.mark.parametrize("batch", [(), (0,), (3,)], ids=["image", "no-images", "images"])
def test_what_is_frozen_leaves_the_divisor_in_batches_of_any_size(map_: ConvMap, batch: tuple[int, ...], learns: tuple[bool, bool]) -> None:
    x, weight, bias = map_.tensors(*batch, *SIZES[map_.dims])
    for parameter, learning in zip((weight, bias), learns, strict=True):
        parameter.requires_grad_(learning)
    z = _corrected(map_, x, weight, bias)
    assert torch.equal(z, _plain(map_, x, weight, bias))
    upstream = torch.randn(z.shape, dtype=z.dtype)
    gradients = torch.autograd.grad(z, [p for p in (weight, bias) if p.requires_grad], upstream)
    for actual, wanted in zip(gradients, _wanted(map_, upstream, x, learns), strict=True):
        close(actual, wanted)


@every_kind
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_keep_torchs_output_and_the_definitions_gradients(
    map_: ConvMap, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        z, plain = _corrected(map_, x, weight, bias), _plain(map_, x, weight, bias)
    assert torch.equal(z, plain)
    upstream = torch.randn(z.shape).to(z.dtype)
    x_grad, *gradients = torch.autograd.grad(z, (x, weight, bias), upstream)
    assert torch.equal(x_grad, torch.autograd.grad(plain, x, upstream)[0])
    for actual, wanted in zip(gradients, _wanted(map_, upstream, x, (True, True)), strict=True):
        assert actual.dtype == dtype
        close(actual, wanted, tolerance=2 * max(TOLERANCE[dtype], TOLERANCE[z.dtype]))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_under_autocast_float32_weights_get_what_float16_would_flush_to_zero(biased: bool) -> None:
    map_ = ConvMap("", 2, False, (3, 3), (4, 4), biased, {"padding": 1})
    x, weight, bias = map_.tensors(2, 5, 5, dtype=torch.float32)
    x = 300 * x.detach()
    x[0, :, :2] /= 1e4  # dark patches beside bright ones
    with torch.autocast("cpu", torch.float16):
        z = _corrected(map_, x, weight, bias)
    upstream = (1e-6 * torch.rand(z.shape)).half()
    parameters = [p for p in (weight, bias) if p is not None]
    for actual, wanted in zip(torch.autograd.grad(z, parameters, upstream), _wanted(map_, upstream, x, (True, biased)), strict=True):
        assert actual.dtype == torch.float32
        close(actual, wanted, tolerance=1e-5)


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_patches_of_zeros_and_beyond_the_range_give_finite_gradients(biased: bool) -> None:
    map_ = ConvMap("", 1, False, (2,), (1, 1), biased)
    x, weight, bias = map_.tensors(1, 8, dtype=torch.float32)
    x = torch.tensor([[[0.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 1e25]]])  # of seven patches three are zero and one beyond
    z = _corrected(map_, x, weight, bias)
    (gradient,) = torch.autograd.grad(z.sum(), weight)
    n = float(biased)
    wanted = [3 / (25 + n) + 4 / (16 + n), 3 / (9 + n) + 4 / (25 + n)]
    close(gradient.flatten(), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("map_", SOME, ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_a_step_moves_every_position_by_minus_lr_its_gradient_plus_what_the_others_do(map_: ConvMap, biased: bool) -> None:
    lr = 0.37
    x, weight, bias = map_.tensors(2, *{1: (8,), 2: (4, 5), 3: (3, 2, 3)}[map_.dims])
    bias = bias if biased else None
    z = _corrected(map_, x, weight, bias)
    z.retain_grad()
    ((3 * z).softmax(1)[:, 0].log().mean() + z.sin().mean()).backward()
    with torch.no_grad():
        moved = [None if p is None else p - lr * p.grad for p in (weight, bias)]
        change = _plain(map_, x, *moved) - z  # type: ignore[arg-type]
    assert z.grad is not None
    for patches, moves, g in zip(_patches(map_, x), _rows(map_, change), _rows(map_, z.grad), strict=True):
        matrix = interference(patches, (True, biased))
        assert (matrix.diagonal() - 1).abs().max() < 1e-12
        close(moves, -lr * matrix @ g, tolerance=1e-11)


def test_a_step_on_one_patch_moves_it_by_minus_lr_its_gradient_whatever_its_length() -> None:
    for length in (0.01, 1.0, 300.0):
        map_ = ConvMap("", 2, False, (3, 2), (3, 4))
        x, weight, bias = map_.tensors(1, 3, 2)
        x = length * x.detach()
        z = _corrected(map_, x, weight, bias)
        weight_grad, bias_grad, upstream = torch.autograd.grad(z.sin().sum(), (weight, bias, z))
        close(F.conv2d(x, weight - 0.37 * weight_grad, bias - 0.37 * bias_grad) - z, -0.37 * upstream, tolerance=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", ["channels-last", "strided", "expanded"])
def test_gradients_do_not_depend_on_strides_and_the_output_has_torchs_memory_format(layout: str, groups: int) -> None:
    map_ = ConvMap("", 2, False, (3, 3), (4, 8), geometry={"padding": 1, "groups": groups})
    x, weight, bias = map_.tensors(2, 5, 6)
    given: Any = {
        "channels-last": lambda: x.to(memory_format=torch.channels_last),
        "strided": lambda: torch.stack([x, -x], -1)[..., 0],
        "expanded": lambda: x[:1].expand(2, -1, -1, -1),
    }[layout]()
    z, contiguous = (_corrected(map_, tensor, weight, bias) for tensor in (given, given.contiguous()))
    assert z.stride() == _plain(map_, given, weight, bias).stride()
    numbers = torch.randn_like(z)
    upstreams = {
        "of a sum": numbers[:1, :1, :1, :1].expand_as(z),
        "of an average": numbers[..., :1, :1].expand_as(z),
        "channels last": numbers.to(memory_format=torch.channels_last),
        "strided": torch.stack([numbers, -numbers], -1)[..., 0],
    }
    for upstream in upstreams.values():
        gradients = [torch.autograd.grad(f, (weight, bias), upstream, retain_graph=True) for f in (z, contiguous)]
        for actual, wanted in zip(*gradients, strict=True):
            close(actual, wanted)


@every_kind
def test_per_sample_gradients_are_those_of_a_loop(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(3, *SIZES[map_.dims])

    def loss(weight: Tensor, bias: Tensor, image: Tensor) -> Tensor:
        return _corrected(map_, image, weight, bias).relu_().square().sum()

    at_once = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(weight.detach(), bias.detach(), x.detach())
    for i, image in enumerate(x):
        for actual, wanted in zip(at_once, torch.autograd.grad(loss(weight, bias, image), (weight, bias)), strict=True):
            close(actual[i], wanted)


def test_gradcheck_fails_for_the_weight_and_passes_for_the_input() -> None:
    map_ = SOME[1]
    x, weight, bias = map_.tensors(1, 3, 3)
    assert torch.autograd.gradcheck(lambda x: _corrected(map_, x, weight, bias), x)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda w: _corrected(map_, x, w, bias), weight)


def test_nothing_as_large_as_the_patches_is_made() -> None:
    x, weight = torch.randn(4, 8, 32, 32), torch.randn(8, 8, 7, 7, requires_grad=True)
    z = gradient.sample_corrected_conv2d(x, weight, padding=3)
    with torch.profiler.profile(profile_memory=True) as profile:
        z.sum().backward()
    largest = max(abs(event.cpu_memory_usage) for event in profile.key_averages() if event.key != "[memory]")
    assert largest < 8 * x.numel() * 4  # unfolded it is 49 times x


def test_shapes_and_options_that_do_not_fit_are_named() -> None:
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(6, 2, 3, 3)
    function = gradient.sample_corrected_conv2d
    with pytest.raises(ValueError, match="x must have 2 channels to go with"):
        function(x, weight)
    with pytest.raises(ValueError, match="bias must have the shape"):
        function(x, weight, torch.zeros(3), groups=2)
    with pytest.raises(ValueError, match='padding "same" needs a stride of 1'):
        function(x, weight, stride=2, padding="same", groups=2)
    with pytest.raises(ValueError, match="the kernel reaches over"):
        function(x, weight, dilation=4, groups=2)
    with pytest.raises(TypeError, match="x must be a real floating-point tensor"):
        function(x.long(), weight, groups=2)
