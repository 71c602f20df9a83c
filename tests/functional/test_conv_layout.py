# Memory formats, strides and views: what must not change a result, and channels_last in, channels_last out.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conv_maps import ConvMap, every_map
from maps import gradients
from oracles import TOLERANCE, close
from torch import Tensor

from affine_divergence.functional import affine_like_conv2d

SIZES = {1: (7,), 2: (5, 6), 3: (3, 4, 4)}
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every-other-column": lambda x: torch.stack([x, x.neg()], -1).flatten(-2)[..., ::2],
    "every-other-image": lambda x: torch.stack([x, x.neg()], 1).flatten(0, 1)[::2],
    "every-other-channel": lambda x: torch.stack([x, x.neg()], 2).flatten(1, 2)[:, ::2],
    "channels-innermost": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "images-innermost": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # torch's, of its own copy
@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4, 16])
@pytest.mark.parametrize("padding", [1, "same", 3], ids=str)
def test_outputs_and_input_gradients_are_channels_last_where_torchs_are(
    kind: str, dtype: torch.dtype, dims: int, groups: int, padding: int | str
) -> None:
    channels = (max(4, groups), 2 * max(4, groups))
    map_ = ConvMap(kind, dims, False, (2, 3, 2)[:dims], channels, geometry={"padding": padding, "groups": groups})
    x, weight, bias = map_.tensors(3, *SIZES[dims], dtype=dtype)
    x = x.detach().to(memory_format=FORMATS[dims]).requires_grad_()
    z = map_(x, weight, bias)
    plain = getattr(torch.nn.functional, f"conv{dims}d")(x, weight, bias, **map_.geometry)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(memory_format=FORMATS[dims])
    (x_grad,), (plain_grad,) = gradients(z, upstream, x), gradients(plain, upstream, x)
    for ours, theirs in ((z, plain), (x_grad, plain_grad)):
        kept = theirs.is_contiguous(memory_format=FORMATS[dims])
        assert kept or (dtype, dims) == (torch.bfloat16, 3)  # there it depends on the CPU
        assert ours.is_contiguous(memory_format=FORMATS[dims]) == kept
    (from_contiguous,) = gradients(map_(x, weight, bias), upstream.contiguous(), x)
    close(from_contiguous, x_grad, tolerance=2 * TOLERANCE[dtype])
    assert map_(x.detach().contiguous(), weight.detach(), bias).is_contiguous()


@pytest.mark.parametrize("dims", [2, 3])
def test_a_weight_in_channels_last_makes_the_output_so_as_in_torch(dims: int) -> None:
    map_ = ConvMap("affine-like", dims, False, (3,) * dims, (4, 6), geometry={"padding": 1})
    x, weight, bias = map_.tensors(2, *SIZES[dims], dtype=torch.float32)
    weight = weight.detach().to(memory_format=FORMATS[dims])
    plain = getattr(torch.nn.functional, f"conv{dims}d")
    assert plain(x, weight, bias, padding=1).is_contiguous(memory_format=FORMATS[dims])
    assert map_(x, weight, bias).is_contiguous(memory_format=FORMATS[dims])


@every_map
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_change_outputs_or_gradients(map_: ConvMap, layout: str) -> None:
    for dtype in (torch.float64, torch.float32):
        x, weight, bias = map_.tensors(3, *SIZES[map_.dims], dtype=dtype)
        wanted = map_(x, weight, bias)
        view = LAYOUTS[layout](x)
        assert torch.equal(view, x)
        z = map_(view, weight, bias)
        close(z, wanted)
        upstream = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
        for actual, expected in zip(
            gradients(z, LAYOUTS[layout](upstream), x, weight, bias), gradients(wanted, upstream, x, weight, bias), strict=True
        ):
            close(actual, expected)


@every_map
def test_strided_and_expanded_upstream_gradients_give_the_gradients_of_dense_ones(map_: ConvMap) -> None:
    tensors = map_.tensors(3, *SIZES[map_.dims])
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda z: z.sum(),
        "mean-over-positions": lambda z: z.flatten(2).mean(2).square().sum(),
        "one-image": lambda z: z[1].sum(),
        "every-other-output": lambda z: z[..., ::2].square().sum(),
        "one-number": lambda z: z.flatten()[3],
    }
    for loss in losses.values():
        values = [loss(f(*tensors)) for f in (map_, map_.expected)]
        for actual, wanted in zip(*(gradients(v, torch.ones_like(v), *tensors) for v in values), strict=True):
            close(actual, wanted, scale=float(wanted.abs().max()) or 1.0)


@every_map
def test_an_image_alone_is_the_image_in_a_batch(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(4, *SIZES[map_.dims])
    z = map_(x, weight, bias)
    for image, wanted in zip(x, z, strict=True):
        close(map_(image, weight, bias), wanted)
        close(map_(image.unsqueeze(0), weight, bias)[0], wanted)


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_without_a_graph_the_output_is_the_same_bit_for_bit(map_: ConvMap, dtype: torch.dtype) -> None:
    tensors = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    z = map_(*tensors)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(map_(*tensors), z)


@every_map
def test_nothing_that_was_given_is_written_to(map_: ConvMap) -> None:
    tensors = [t for t in map_.tensors(2, *SIZES[map_.dims]) if t is not None]
    before = [t.detach().clone() for t in tensors]
    z = map_(*tensors)
    upstream = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1))
    kept = upstream.clone()
    z.backward(upstream)
    assert all(torch.equal(t, b) for t, b in zip([*tensors, upstream], [*before, kept], strict=True))


@every_map
def test_in_place_operations_on_the_output_leave_its_gradients_right(map_: ConvMap) -> None:
    # ReLU(inplace=True) and the += of a residual connection.
    for batch in ((2,), ()):
        tensors = map_.tensors(*batch, *SIZES[map_.dims])
        in_place = map_(*tensors).add_(0.1).relu_()
        wanted = (map_.expected(*tensors) + 0.1).relu()
        upstream = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(1))
        for actual, expected in zip(gradients(in_place, upstream, *tensors), gradients(wanted, upstream, *tensors), strict=True):
            close(actual, expected)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_expanded_gradient_goes_through_grouped_channels_last_images(reduction: str) -> None:
    # The scaled gradient then lies so that no view of it is the ungrouped one.
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 2, 3, 3)
    gradients = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        image = x.clone(memory_format=memory_format).requires_grad_()
        own = weight.clone().requires_grad_()
        getattr(affine_like_conv2d(image, own, None, padding=1, groups=2), reduction)().backward()
        gradients.append((image.grad, own.grad))
    for one, other in zip(*gradients, strict=True):
        close(one, other)
