# Values and gradients of the patch-normalised convolutions are those of the definition, for every option, dtype and shape.
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conv_maps import KERNELS, OPTIONS, SIZES, TABLE, ConvMap, every_kind, every_map
from maps import gradients
from oracles import TOLERANCE, close
from torch import Tensor


def _upstream(z: Tensor) -> Tensor:
    return torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(z.dtype)


def _agree(map_: ConvMap, *tensors: Tensor | None, tolerance: float | None = None) -> None:
    z, expected = map_(*tensors), map_.expected(*tensors)  # type: ignore[arg-type]
    close(z, expected, tolerance=tolerance)
    upstream = _upstream(z)
    wanted_gradients = gradients(expected, upstream.double(), *tensors)
    for actual, wanted in zip(gradients(z, upstream, *tensors), wanted_gradients, strict=True):
        close(actual, wanted, tolerance=tolerance if tolerance is None else 2 * tolerance)


@pytest.mark.parametrize("map_", TABLE, ids=str)
def test_values_and_gradients_are_those_of_the_definition(map_: ConvMap) -> None:
    _agree(map_, *map_.tensors(2, *SIZES[map_.dims]))


def test_the_table_pairs_every_choice_with_every_other() -> None:
    chosen = [
        {("kind", m.kind, m.bias, *m.options.items()), ("dims", m.dims, m.transposed), *((k, str(v)) for k, v in m.geometry.items())}
        for m in TABLE
    ]
    for transposed in (False, True):
        maps = [c for c, m in zip(chosen, TABLE, strict=True) if m.transposed is transposed]
        for kind, bias, options in OPTIONS:
            of_kind = [c for c in maps if ("kind", kind, bias, *options.items()) in c]
            met = set().union(*of_kind)
            assert {c for c in set().union(*maps) if c[0] != "kind"} <= met


@every_map
@pytest.mark.parametrize("shape", ["unbatched", "no-images", "one-image"])
def test_images_alone_or_none_at_all_are_those_of_the_definition(map_: ConvMap, shape: str) -> None:
    batch = {"unbatched": (), "no-images": (0,), "one-image": (1,)}[shape]
    _agree(map_, *map_.tensors(*batch, *SIZES[map_.dims]))


@every_map
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_dtype_gives_the_definition_within_its_rounding(map_: ConvMap, dtype: torch.dtype) -> None:
    tensors = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    _agree(map_, *tensors, tolerance=TOLERANCE[dtype])
    z = map_(*tensors)
    assert z.dtype == dtype
    assert {g.dtype for g in gradients(z, _upstream(z), *tensors)} == {dtype}


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
def test_kernels_of_one_tap_and_kernels_as_large_as_the_image_are_those_of_the_definition(kind: str, dims: int, transposed: bool) -> None:
    for kernel in ((1,) * dims, SIZES[dims]):
        _agree(replace(ConvMap(kind, dims, transposed), kernel=kernel), *ConvMap(kind, dims, transposed, kernel).tensors(2, *SIZES[dims]))


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
@pytest.mark.parametrize("width", range(1, 18))
def test_windows_of_every_width_are_summed_right(kind: str, width: int) -> None:
    for transposed in (False, True):
        map_ = ConvMap(kind, 1, transposed, (width,), (2, 2), geometry={"stride": 2, "padding": width // 2})
        _agree(map_, *map_.tensors(1, 19))


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("groups", "channels"), [(1, (24, 8)), (1, (3, 4)), (4, (48, 8)), (16, (32, 16)), (16, (16, 32)), (32, (32, 32))])
def test_batches_larger_than_what_is_worked_on_at_once_are_those_of_the_definition(
    kind: str, channels_last: bool, groups: int, channels: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affine_divergence.functional._channels._PART", 500)
    for transposed in (False, True):
        geometry = {"stride": 2, "padding": 1, "groups": groups} | ({"output_padding": 1} if transposed else {})
        map_ = ConvMap(kind, 2, transposed, (3, 3), channels, geometry=geometry)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x, weight, bias = map_.tensors(5, 5, 7, dtype=dtype)
            if channels_last:
                x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
            _agree(map_, x, weight, bias, tolerance=TOLERANCE[dtype])


@every_map
def test_only_the_gradients_asked_for_are_made(map_: ConvMap) -> None:
    tensors = [t for t in map_.tensors(2, *SIZES[map_.dims]) if t is not None]
    z = map_(*tensors)
    everything = gradients(z, _upstream(z), *tensors)
    for index, tensor in enumerate(tensors):
        asked = [t.detach().requires_grad_(t is tensor) for t in tensors]
        (alone,) = gradients(map_(*asked), _upstream(z), asked[index])
        close(alone, everything[index])
        assert [t.grad for t in asked] == [None] * len(asked)


@every_kind
def test_where_the_weight_alone_learns_no_gradient_of_the_image_is_computed(map_: ConvMap) -> None:
    wanted: list[list[bool]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.convolution_backward.default:
                wanted.append([*args[-1]])
            return func(*args, **(kwargs or {}))

    x, weight, _ = map_.tensors(2, *SIZES[map_.dims])
    total = map_(x.detach(), weight).sum()
    with Watch():
        total.backward()
    assert wanted == [[False, True, False]]


@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_numbers_tuples_lists_and_one_number_for_all_axes_mean_the_same(kind: str) -> None:
    map_ = ConvMap(kind, 2, False, (3, 3))
    tensors = map_.tensors(2, 6, 7)
    wanted = replace(map_, geometry={"stride": 2, "padding": 1, "dilation": 2})(*tensors)
    for geometry in (
        {"stride": (2, 2), "padding": (1, 1), "dilation": (2, 2)},
        {"stride": [2, 2], "padding": [1, 1], "dilation": [2, 2]},
        {"stride": (2,), "padding": (1,), "dilation": torch.Size((2, 2))},
    ):
        assert torch.equal(replace(map_, geometry=geometry)(*tensors), wanted)
    assert torch.equal(map_.function(*tensors, 2, 1, 2, 1), wanted)
    transposed = ConvMap(kind, 2, True, (3, 3))
    tensors = transposed.tensors(2, 4, 5)
    named = replace(transposed, geometry={"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 2})(*tensors)
    assert torch.equal(transposed.function(*tensors, 2, 1, 1, 1, 2), named)


def test_the_kernels_of_the_table_are_even_and_odd() -> None:
    assert {k % 2 for kernel in KERNELS.values() for k in kernel} == {0, 1}
