# The squared norms of patches, and the sums over windows behind them, against patches written out.
from __future__ import annotations

import pytest
import torch
from conv_maps import SIZES, TABLE, ConvMap
from conv_oracles import vectors
from oracles import TOLERANCE, close
from torch.autograd import gradcheck, gradgradcheck

from affine_divergence.functional import patch_sqnorm
from affine_divergence.functional._geometry import conv_geometry, conv_transpose_geometry

GEOMETRIES = list({str(sorted(m.geometry.items(), key=str)) + str(m.dims): m for m in TABLE}.values())
CONVOLUTIONS = [m for m in GEOMETRIES if not m.transposed]


@pytest.mark.parametrize("map_", CONVOLUTIONS, ids=str)
def test_the_norms_are_those_of_the_patches_written_out(map_: ConvMap) -> None:
    x = map_.tensors(2, *SIZES[map_.dims])[0].detach()
    patches = map_.patches(x)
    wanted = vectors(patches, map_.groups).square().sum(-1).unflatten(2, patches.shape[3:])
    close(patch_sqnorm(x, map_.kernel, **map_.geometry), wanted)
    close(patch_sqnorm(x[0], map_.kernel, **map_.geometry), wanted[0])
    assert patch_sqnorm(x[:0], map_.kernel, **map_.geometry).shape == (0, *wanted.shape[1:])


@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_norms_without_a_graph_are_bit_identical(groups: int, dtype: torch.dtype) -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 32, 9, 9).to(dtype).to(memory_format=memory_format).requires_grad_()
        sqnorm = patch_sqnorm(x, 3, padding=1, groups=groups)
        with torch.no_grad():
            assert torch.equal(patch_sqnorm(x, 3, padding=1, groups=groups), sqnorm)


@pytest.mark.parametrize("map_", GEOMETRIES[::3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_spread_over_windows_is_the_adjoint_of_their_sum(map_: ConvMap, dtype: torch.dtype) -> None:
    # ⟨sums(a), b⟩ = ⟨a, spread(b)⟩, with few groups and with so many that a convolution with ones takes their place.
    options = {name: value for name, value in map_.geometry.items() if name != "groups"}
    for groups in (2, 16):
        make = conv_transpose_geometry if map_.transposed else conv_geometry
        geometry = make(map_.kernel, groups=groups, **options)
        a = torch.randn(2, groups, *SIZES[map_.dims], dtype=torch.float64).to(dtype)
        with torch.no_grad():
            sums = geometry.patch_sums(a)
            b = torch.randn(sums.shape, dtype=torch.float64).to(dtype)
            spread = geometry.patch_spread(b, a.shape[2:])
        assert spread.shape == a.shape
        sides = [(u.double() * v.double()).sum() for u, v in ((sums, b), (a, spread))]
        assert abs(sides[0] - sides[1]) <= 10 * TOLERANCE[dtype] * (sums.double().norm() * b.double().norm() + 1)
        close(sums, geometry.patch_sums(a.requires_grad_()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_norms_are_taken_in_float32_or_wider(dtype: torch.dtype) -> None:
    sqnorm = patch_sqnorm(torch.full((1, 8, 2, 2), 200.0, dtype=dtype), 2)
    assert sqnorm.dtype == torch.promote_types(dtype, torch.float32)
    assert sqnorm.item() == 32 * 200.0**2


def test_one_number_is_the_kernel_of_all_axes_of_a_batched_image() -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    assert torch.equal(patch_sqnorm(x, 2), patch_sqnorm(x, (2, 2, 2)))
    close(patch_sqnorm(x[0], (2, 2, 2)), patch_sqnorm(x, 2)[0].double())
    assert patch_sqnorm(x[0], 2).shape == (3, 1, 4, 5)  # read as three images of two axes with four channels


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, for forward mode
def test_it_can_be_differentiated_twice() -> None:
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: patch_sqnorm(x, 2, padding=1, groups=2), x, check_forward_ad=True)
    assert gradgradcheck(lambda x: patch_sqnorm(x, 2, padding=1, groups=2), x)


def test_integers_are_summed_exactly() -> None:
    x = torch.randint(-9, 10, (2, 4, 9, 9)).float()
    ones = torch.ones(1, 4, 3, 3, dtype=torch.float64)
    assert torch.equal(patch_sqnorm(x, 3, 2, 1).double(), torch.nn.functional.conv2d(x.double() ** 2, ones, stride=2, padding=1))
