# The batch correction of convolutions is that of their patches, written out: every option, both forms, and what a real step does.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batch_oracles import by_group, joined, ridge_of_patches
from conv_maps import SIZES, TABLE, ConvMap
from conv_oracles import vectors
from oracles import close
from torch import Tensor

from affine_divergence import gradient
from affine_divergence.gradient import _patch_rows, batch_corrected_conv2d

FUNCTIONS: dict[int, Callable[..., Tensor]] = {dims: getattr(gradient, f"batch_corrected_conv{dims}d") for dims in (1, 2, 3)}
PLAIN: dict[int, Callable[..., Tensor]] = {dims: getattr(torch.nn.functional, f"conv{dims}d") for dims in (1, 2, 3)}
LR = 0.37
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's own, of its convolution
DAMPINGS = [0.0, 1e-3, 1.0]


def _table() -> Iterator[ConvMap]:
    """Every geometry of the table of convolutions, with and without a bias as it was drawn there."""
    seen = set()
    for map_ in TABLE:
        own = replace(map_, kind="batch", options={})
        if not map_.transposed and str(own) not in seen:
            seen.add(str(own))
            yield own


GEOMETRIES = list(_table())


def _smallest(map_: ConvMap) -> tuple[int, ...]:
    """The size of an image with a position or two: fewer than a patch has entries."""
    dilation = map_._each("dilation", 1)
    return tuple(d * (k - 1) + 1 for k, d in zip(map_.kernel, dilation, strict=True))


def _gradient(map_: ConvMap, x: Tensor, weight: Tensor, bias: Tensor | None, **options: float) -> tuple[Tensor, Tensor]:
    z = FUNCTIONS[map_.dims](x, weight, bias, **map_.geometry, **options)
    g = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(z.dtype)
    z.backward(g)
    return joined(weight.grad, None if bias is None else bias.grad), g


def _is_dual(map_: ConvMap, g: Tensor, weight: Tensor) -> bool:
    return g.shape[0] * g.shape[2:].numel() <= weight[0].numel() + map_.bias


@pytest.mark.parametrize("map_", GEOMETRIES, ids=str)
def test_the_gradient_is_the_ridge_solution_of_the_patches(map_: ConvMap) -> None:
    for size in (SIZES[map_.dims], _smallest(map_)):
        for damping in DAMPINGS:
            x, weight, bias = map_.tensors(2 if size is SIZES[map_.dims] else 1, *size)
            actual, g = _gradient(map_, x, weight, bias, damping=damping)
            close(actual, ridge_of_patches(map_.patches(x), g, map_.groups, damping, bias=map_.bias), tolerance=1e-9)


def test_the_table_has_both_forms_with_every_choice() -> None:
    met: dict[bool, set[tuple[str, str]]] = {True: set(), False: set()}
    for map_ in GEOMETRIES:
        for images, size in ((2, SIZES[map_.dims]), (1, _smallest(map_))):
            x, weight, bias = map_.tensors(images, *size)
            z = PLAIN[map_.dims](x, weight, bias, **map_.geometry)
            met[_is_dual(map_, z, weight)] |= {(k, str(v)) for k, v in map_.geometry.items()} | {("bias", str(map_.bias))}
    everything = {(k, str(v)) for map_ in GEOMETRIES for k, v in map_.geometry.items()} | {("bias", "True"), ("bias", "False")}
    assert met[True] == met[False] == everything


SOME = [
    ConvMap("batch", 1, kernel=(4,), channels=(3, 2), geometry={"stride": 2, "padding": 1}),
    ConvMap("batch", 2, kernel=(3, 2), channels=(4, 6), geometry={"padding": "same", "groups": 2}),
    ConvMap("batch", 2, kernel=(3, 3), channels=(4, 6), bias=False),
    ConvMap("batch", 3, kernel=(2, 2, 1), channels=(2, 3), geometry={"stride": (1, 2, 1)}),
]
some = pytest.mark.parametrize("map_", SOME, ids=str)


@some
@pytest.mark.parametrize("damping", DAMPINGS)
def test_a_step_moves_all_positions_by_minus_lr_gram_times_its_damped_inverse_times_gradients(map_: ConvMap, damping: float) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims])
    _, g = _gradient(map_, x, weight, bias, damping=damping)
    with torch.no_grad():
        parameters = [None if p is None else p - LR * p.grad for p in (weight, bias)]
        change = PLAIN[map_.dims](x, *parameters, **map_.geometry) - PLAIN[map_.dims](x, weight, bias, **map_.geometry)
    patches = vectors(map_.patches(x.detach()), map_.groups).transpose(0, 1).flatten(1, 2)
    for of_group, moved, upstream in zip(patches, by_group(change, map_.groups), by_group(g, map_.groups), strict=True):
        matrix = of_group @ of_group.mT + float(map_.bias)
        damped = matrix + damping * matrix.trace() / len(matrix) * torch.eye(len(matrix), dtype=torch.float64)
        close(moved, -LR * matrix @ torch.linalg.pinv(damped, hermitian=True, rtol=1e-10) @ upstream, tolerance=1e-8)


def test_at_damping_0_few_positions_move_by_exactly_minus_lr_times_their_gradients() -> None:
    map_ = ConvMap("batch", 2, kernel=(3, 3), channels=(4, 6), geometry={"groups": 2})
    x, weight, bias = map_.tensors(2, 5, 5)  # 18 positions, patches of 18 and 1
    _, g = _gradient(map_, x, weight, bias, damping=0.0)
    with torch.no_grad():
        change = torch.conv2d(x, weight - LR * weight.grad, bias - LR * bias.grad, groups=2) - torch.conv2d(x, weight, bias, groups=2)
    close(change, -LR * g, tolerance=1e-8)


@some
def test_an_image_alone_is_a_batch_of_one(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(*SIZES[map_.dims])
    alone, g = _gradient(map_, x, weight, bias)
    close(alone, ridge_of_patches(map_.patches(x[None]), g[None], map_.groups, 1e-3, bias=map_.bias), tolerance=1e-9)


@some
def test_no_images_have_a_gradient_of_zero(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(0, *SIZES[map_.dims])
    assert not _gradient(map_, x, weight, bias)[0].any()


@some
@pytest.mark.parametrize("weight_learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_frozen_leaves_the_gram_matrix(map_: ConvMap, weight_learns: bool, dtype: torch.dtype) -> None:
    if map_.bias:
        x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
        (bias if weight_learns else weight).requires_grad_(False)
        z = FUNCTIONS[map_.dims](x, weight, bias, **map_.geometry)
        g = torch.randn_like(z)
        z.backward(g)
        wanted = ridge_of_patches(map_.patches(x), g, map_.groups, 1e-3, weight=weight_learns, bias=not weight_learns)
        learning, frozen = (weight, bias) if weight_learns else (bias, weight)
        assert frozen.grad is None
        close(learning.grad.reshape(wanted.shape), wanted, tolerance={torch.float64: 1e-9, torch.float32: 1e-4}[dtype])


@pytest.mark.parametrize("part", [1, 300, 5000])
@some
def test_parts_of_the_batch_add_up_to_the_whole(map_: ConvMap, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for images, size in ((5, SIZES[map_.dims]), (1, _smallest(map_))):
        x, weight, bias = map_.tensors(images, *size)
        whole, _ = _gradient(map_, x, weight, bias)
        weight.grad = None
        if bias is not None:
            bias.grad = None
        with monkeypatch.context() as patch:
            patch.setattr(_patch_rows, "_PART", part)
            close(_gradient(map_, x, weight, bias)[0], whole, tolerance=1e-10)


def test_no_more_is_unfolded_at_once_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_patch_rows, "_PART", 4000)
    seen: list[int] = []
    plain = _patch_rows.patch_rows
    monkeypatch.setattr(_patch_rows, "patch_rows", lambda *a: seen.append((rows := plain(*a)).numel()) or rows)
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    batch_corrected_conv2d(torch.randn(40, 3, 8, 8), weight).sum().backward()
    wide = torch.randn(4, 300, 3, 3, requires_grad=True)
    batch_corrected_conv2d(torch.randn(3, 300, 6, 6), wide).sum().backward()
    assert len(seen) > 20
    assert max(seen) <= 4000
    assert sum(seen) == 40 * 36 * 27 + 2 * 3 * 16 * 2700  # in the dual form for its matrix, and for the gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@some
def test_narrower_dtypes_round_the_result_alone(map_: ConvMap, dtype: torch.dtype) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims], dtype=dtype)
    actual, g = _gradient(map_, x, weight, bias, damping=0.01)
    assert weight.grad.dtype == dtype
    wanted = ridge_of_patches(map_.patches(x), g, map_.groups, 0.01, bias=map_.bias)
    close(actual, wanted, tolerance=max(1e-5, torch.finfo(dtype).eps))


def test_outputs_input_gradients_and_memory_formats_are_torchs() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = torch.randn(2, 4, 6, 7, dtype=dtype), torch.randn(6, 2, 3, 3, dtype=dtype), torch.randn(6, dtype=dtype)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        weight.requires_grad_()
        options: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
        z, plain = batch_corrected_conv2d(x, weight, bias, **options), torch.conv2d(x, weight, bias, **options)
        assert torch.equal(z, plain)
        assert z.is_contiguous(memory_format=torch.channels_last) == plain.is_contiguous(memory_format=torch.channels_last)
        g = torch.randn_like(z)
        x_grad, weight_grad = torch.autograd.grad(z, [x, weight], g)
        assert torch.equal(x_grad, torch.autograd.grad(plain, x, g)[0])
        same = torch.autograd.grad(batch_corrected_conv2d(x.contiguous(), weight, bias, **options), weight, g)[0]
        close(weight_grad, same)


def test_the_gradient_is_not_the_derivative_of_the_loss() -> None:
    x, weight, bias = ConvMap("batch", 2, kernel=(2, 2), channels=(2, 2)).tensors(1, 3, 3)
    assert not torch.autograd.gradcheck(batch_corrected_conv2d, (x, weight, bias), raise_exception=False)
    assert torch.autograd.gradcheck(lambda x: batch_corrected_conv2d(x, weight.detach(), bias.detach()), (x,))


def test_arguments_are_checked_as_those_of_the_structural_convolutions() -> None:
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)
    with pytest.raises(ValueError, match="x must have 4 channels"):
        batch_corrected_conv2d(x[:, :3], weight)
    with pytest.raises(ValueError, match='padding "same" needs a stride of 1'):
        batch_corrected_conv2d(x, weight, stride=2, padding="same")
    with pytest.raises(ValueError, match="the kernel reaches over"):
        batch_corrected_conv2d(x, weight, dilation=3)
    with pytest.raises(ValueError, match="damping must be zero or positive"):
        batch_corrected_conv2d(x, weight, damping=-1.0)
