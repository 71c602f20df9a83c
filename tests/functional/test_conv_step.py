# What a real gradient step on W and b does to the activations of a convolution, position by position.
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conv_maps import ConvMap
from conv_oracles import vectors
from oracles import close
from torch import Tensor

LR = 0.37

# One image and one output position: the kernel is the image, or one input reaches one output.
ONE_POSITION = {
    "1d": (ConvMap("", 1, kernel=(5,), channels=(2, 4)), (5,)),
    "2d": (ConvMap("", 2, kernel=(3, 2), channels=(3, 4)), (3, 2)),
    "2d-padded": (ConvMap("", 2, kernel=(4, 4), channels=(3, 4), geometry={"padding": 1}), (2, 2)),
    "2d-dilated": (ConvMap("", 2, kernel=(2, 2), channels=(3, 4), geometry={"dilation": 2}), (3, 3)),
    "3d": (ConvMap("", 3, kernel=(2, 1, 2), channels=(2, 3)), (2, 1, 2)),
    "transposed-1d": (ConvMap("", 1, True, (3,), (4, 3), geometry={"padding": 3, "stride": 2}), (3,)),
    "transposed-2d": (ConvMap("", 2, True, (3, 3), (4, 3), geometry={"padding": 1}), (1, 1)),
    "transposed-3d": (ConvMap("", 3, True, (1, 1, 1), (4, 3)), (1, 1, 1)),
}
one_position = pytest.mark.parametrize("where", ONE_POSITION)

MANY_POSITIONS = [
    ConvMap("", 1, False, (4,), (3, 4), geometry={"stride": 2, "padding": 1}),
    ConvMap("", 2, False, (3, 2), (4, 6), geometry={"padding": "same", "groups": 2}),
    ConvMap("", 2, False, (3, 3), (4, 8), geometry={"padding": 1, "groups": 4}),
    ConvMap("", 2, True, (3, 2), (4, 6), geometry={"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
    ConvMap("", 3, False, (2, 2, 1), (2, 3)),
    ConvMap("", 3, True, (2, 2, 1), (2, 3), geometry={"stride": (1, 2, 1)}),
]
SIZES = {1: (8,), 2: (4, 5), 3: (3, 2, 3)}


def _loss(z: Tensor) -> Tensor:
    # Not quadratic, and a mean: the law holds whatever the loss.
    return (3 * z).softmax(1)[:, 0].log().mean() + z.sin().mean()


def _step(map_: ConvMap, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The change of the activations at the same x, and ∂L/∂z before the step."""
    z = map_(x, weight, bias)
    z.retain_grad()
    _loss(z).backward()
    with torch.no_grad():
        moved = [None if p is None else p - LR * p.grad for p in (weight, bias)]
        assert z.grad is not None
        return map_(x, *moved) - z, z.grad  # type: ignore[arg-type]


def _one(where: str, kind: str, bias: bool, length: float, **options: float) -> tuple[Tensor, Tensor, float]:
    base, size = ONE_POSITION[where]
    map_ = replace(base, kind=kind, bias=bias, options=options)
    x, *parameters = map_.tensors(1, *size)
    x = length * x.detach()
    change, upstream = _step(map_, x, *parameters)
    assert change.shape[2:].numel() == 1
    assert upstream.any()
    return change, upstream, float(map_.patches(x).square().sum())


@one_position
@pytest.mark.parametrize("length", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("gain", [1.0, 1.7])
@pytest.mark.parametrize(
    ("kind", "bias", "options", "self_term"),
    [("affine-like", True, {}, 1.0), ("norm-like", True, {"eps": 0.0}, 2.0), ("norm-like", False, {"eps": 0.0}, 1.0)],
    ids=["affine-like", "norm-like", "norm-like-no-bias"],
)
def test_a_step_on_one_patch_moves_it_by_the_same_multiple_of_its_gradient_whatever_its_length(
    where: str, kind: str, bias: bool, options: dict[str, float], self_term: float, gain: float, length: float
) -> None:
    change, upstream, _ = _one(where, kind, bias, length, gain=gain, **options)
    close(change, -LR * gain**2 * self_term * upstream, tolerance=1e-11)


@one_position
@pytest.mark.parametrize("length", [0.01, 1.0, 300.0])
def test_without_a_bias_an_affine_like_patch_moves_by_less_than_its_gradient(where: str, length: float) -> None:
    change, upstream, sqnorm = _one(where, "affine-like", False, length, gain=1.7)
    assert sqnorm / (sqnorm + 1) < 1
    close(change, -LR * 1.7**2 * sqnorm / (sqnorm + 1) * upstream, tolerance=1e-11)


@one_position
@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_a_step_on_a_black_patch_moves_it_by_its_gradient_through_the_bias_alone(where: str, kind: str) -> None:
    change, upstream, sqnorm = _one(where, kind, True, 0.0, gain=1.7)
    assert sqnorm == 0
    close(change, -LR * 1.7**2 * upstream, tolerance=1e-11)


def _rows(map_: ConvMap, images: Tensor) -> Tensor:
    """(N, C, *out) → (groups, images and positions, C/groups)."""
    return images.flatten(2).unflatten(1, (map_.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


@pytest.mark.parametrize("base", MANY_POSITIONS, ids=lambda m: str(m)[1:])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("kind", ["affine-like", "norm-like"])
def test_a_step_moves_all_positions_of_all_images_by_minus_lr_gram_times_gradients(kind: str, bias: bool, base: ConvMap) -> None:
    options = {"gain": 1.7} | ({"eps": 0.0} if kind == "norm-like" else {})
    map_ = replace(base, kind=kind, bias=bias, options=options)
    x, *parameters = map_.tensors(2, *SIZES[map_.dims])
    change, upstream = _step(map_, x, *parameters)
    patches = vectors(map_.patches(x.detach()), map_.groups).transpose(0, 1).flatten(1, 2)
    for of_group, moved, g in zip(patches, _rows(map_, change), _rows(map_, upstream), strict=True):
        if kind == "affine-like":
            augmented = torch.cat([of_group, torch.ones(len(of_group), 1, dtype=torch.float64)], 1)
            on_sphere = augmented / augmented.norm(dim=1, keepdim=True)
            on_sphere = on_sphere if bias else on_sphere[:, :-1]
            corrected = on_sphere @ on_sphere.mT
        else:
            on_sphere = of_group / of_group.norm(dim=1, keepdim=True)
            corrected = on_sphere @ on_sphere.mT + float(bias)
        close(moved, -LR * 1.7**2 * corrected @ g, tolerance=1e-11)
        if bias:
            close(corrected.diagonal(), torch.full((len(g),), 1.0 if kind == "affine-like" else 2.0, dtype=torch.float64))


@one_position
def test_a_step_on_a_plain_convolution_moves_a_patch_by_its_squared_norm_plus_one(where: str) -> None:
    # What is corrected, by the same measurement.
    base, size = ONE_POSITION[where]
    x, weight, bias = base.tensors(1, *size)
    plain = getattr(torch.nn.functional, f"conv{'_transpose' * base.transposed}{base.dims}d")
    z = plain(x, weight, bias, **base.geometry)
    z.retain_grad()
    _loss(z).backward()
    with torch.no_grad():
        change = plain(x, weight - LR * weight.grad, bias - LR * bias.grad, **base.geometry) - z
    close(change, -LR * (float(base.patches(x.detach()).square().sum()) + 1) * z.grad, tolerance=1e-11)


def test_a_position_that_no_input_reaches_learns_through_the_bias_alone() -> None:
    # Stride 3 with a kernel of 2: every third output has no patch. Also at ε = 0 its self term is gain², not 2 gain².
    map_ = ConvMap("norm-like", 1, True, (2,), (2, 3), geometry={"stride": 3}, options={"eps": 0.0})
    x, weight, bias = map_.tensors(1, 3)
    z = map_(x, weight, bias)
    close(z[0, :, 2], bias)
    z[0, 0, 2].backward()
    assert not weight.grad.any()
    assert not x.grad.any()
    assert bias.grad.tolist() == [1.0, 0.0, 0.0]
