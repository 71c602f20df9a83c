# First and second derivatives of the patch-normalised convolutions in both modes, maps over arguments, and black patches.
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from conv_maps import EVERY, PLAIN, ConvMap, every_kind, every_map
from maps import gradients
from oracles import FLOAT32_EPS, TOLERANCE, close
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import affine_divergence.functional as AF

# torch's own rules for forward mode are loaded through torch.jit.script, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SIZES = {(1, False): (4,), (2, False): (3, 2), (3, False): (1, 2, 2), (2, True): (1, 2)}  # small: finite differences take long


def _tensors(map_: ConvMap, images: int = 1, **options: Any) -> list[Tensor]:
    return [t for t in map_.tensors(images, *SIZES[map_.dims, map_.transposed], **options) if t is not None]


@every_map
def test_first_derivatives_agree_with_finite_differences_in_both_modes(map_: ConvMap) -> None:
    assert gradcheck(map_, _tensors(map_), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@every_map
def test_second_derivatives_agree_with_finite_differences(map_: ConvMap) -> None:
    assert gradgradcheck(map_, _tensors(map_), check_fwd_over_rev=True, fast_mode=True)


# x/‖x‖ jumps at zero, so there is no finite difference to compare with there.
@pytest.mark.parametrize("map_", [m for m in EVERY if m.options.get("eps") != 0.0], ids=str)
def test_an_image_with_one_lit_pixel_has_derivatives_that_agree_with_finite_differences(map_: ConvMap) -> None:
    x, *parameters = _tensors(map_)
    lit = torch.zeros_like(x)
    lit[(0, 0, *(n // 2 for n in SIZES[map_.dims, map_.transposed]))] = 1.0
    inputs = [lit.requires_grad_(), *parameters]
    sharp = map_.kind == "norm-like" and "eps" not in map_.options  # x is to stay far below √ε = 3e-4
    assert gradcheck(map_, inputs, eps=1e-8 if sharp else 1e-6, atol=1e-4 if sharp else 1e-5, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(map_, inputs, eps=1e-8 if sharp else 1e-6, atol=1e-2 if sharp else 1e-5, fast_mode=True)


@every_map
@pytest.mark.parametrize("lit", [False, True], ids=["black", "one-lit-pixel"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_black_patches_give_gain_times_the_bias_and_the_gradients_of_the_definition(map_: ConvMap, lit: bool, dtype: torch.dtype) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims, map_.transposed], dtype=dtype)
    dark = torch.zeros_like(x)
    dark[0] = x.detach()[0]
    if lit:
        dark[(1, 0, *(n // 2 for n in SIZES[map_.dims, map_.transposed]))] = 1.0
    x = dark.requires_grad_()
    z, expected = map_(x, weight, bias), map_.expected(x, weight, bias)
    close(z, expected)
    if not lit:
        shift = 0.0 if bias is None else map_.options.get("gain", 1.0) * bias.detach().to(torch.promote_types(dtype, torch.float32))
        assert torch.equal(z[1], torch.zeros_like(z[1]) + (shift if bias is None else shift.to(dtype).reshape(-1, *[1] * map_.dims)))
    upstream = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted_gradients = gradients(expected, upstream.double(), x, weight, bias)
    for actual, wanted in zip(gradients(z, upstream, x, weight, bias), wanted_gradients, strict=True):
        close(actual, wanted, tolerance=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("map_", [m for m in EVERY if m.options.get("eps") == 0.0], ids=str)
def test_without_an_eps_black_images_pass_no_gradient_and_add_none_to_the_weight(map_: ConvMap) -> None:
    x, weight, bias = map_.tensors(2, *SIZES[map_.dims, map_.transposed])
    x = torch.zeros_like(x).requires_grad_()
    for gradient in gradients(map_(x, weight, bias).sin(), torch.ones_like(map_(x, weight, bias)), x, weight):
        assert not gradient.any()
    (first,) = torch.autograd.grad(map_(x, weight, bias).sin().sum(), x, create_graph=True)
    for second in torch.autograd.grad(first.sum(), [x, weight]):
        assert torch.isfinite(second).all()


def test_a_norm_like_black_patch_passes_the_gradient_over_root_eps() -> None:
    x, weight = torch.zeros(1, 1, 2, 2, dtype=torch.float64, requires_grad=True), torch.ones(1, 1, 2, 2, dtype=torch.float64)
    AF.norm_like_conv2d(x, weight).sum().backward()
    assert x.grad is not None
    close(x.grad, torch.full((1, 1, 2, 2), FLOAT32_EPS**-0.5, dtype=torch.float64))


@every_kind
def test_the_hessian_is_that_of_the_definition(map_: ConvMap) -> None:
    x, *parameters = _tensors(map_)
    inputs = [t.detach() for t in (x, *parameters)]
    everything = tuple(range(len(inputs)))

    def of(function: Callable[..., Tensor]) -> Any:
        return hessian(lambda *tensors: function(*tensors).sin().sum(), argnums=everything)(*inputs)

    for row, expected_row in zip(of(map_), of(map_.expected), strict=True):
        for block, expected in zip(row, expected_row, strict=True):
            close(block, expected, scale=1.0)


@every_map
def test_forward_and_reverse_jacobians_are_equal(map_: ConvMap) -> None:
    inputs = [t.detach() for t in _tensors(map_)]
    everything = tuple(range(len(inputs)))
    for forward, reverse in zip(jacfwd(map_, everything)(*inputs), jacrev(map_, everything)(*inputs), strict=True):
        close(forward, reverse)


@every_kind
def test_a_forward_derivative_of_a_forward_derivative_is_the_hessian_also_under_no_grad(map_: ConvMap) -> None:
    x, *parameters = (t.detach() for t in _tensors(map_))

    def f(v: Tensor) -> Tensor:
        return map_(v, *parameters).square().sum()

    wanted = hessian(f)(x)
    with torch.no_grad():
        close(jacfwd(jacfwd(f))(x), wanted)
    assert wanted.any()


@every_map
def test_a_forward_tangent_of_a_gradient_needs_no_graph_of_it(map_: ConvMap) -> None:
    # Forward over reverse without create_graph: the statistics are then taken with gradients switched off.
    x, *parameters = (t.detach() for t in _tensors(map_))
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    tangents = []
    for create_graph in (False, True):
        leaf = x.clone().requires_grad_()
        with fwAD.dual_level():
            z = map_(fwAD.make_dual(leaf, direction), *parameters)
            (gradient,) = torch.autograd.grad(z.square().sum(), leaf, create_graph=create_graph)
            tangents.append(fwAD.unpack_dual(gradient).tangent.detach())
    close(tangents[0], tangents[1])


@every_map
def test_a_forward_tangent_of_the_upstream_gradient_alone_is_carried_through_the_backward(map_: ConvMap) -> None:
    # The graph is made before the dual level, and walked in it.
    tensors = _tensors(map_)
    z = map_(*tensors)
    upstream, direction = (torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    with fwAD.dual_level():
        actual = torch.autograd.grad(z, tensors, fwAD.make_dual(upstream, direction), retain_graph=True)
        tangents = [fwAD.unpack_dual(gradient).tangent for gradient in actual]
    for tangent, wanted in zip(tangents, torch.autograd.grad(z, tensors, direction), strict=True):
        close(tangent, wanted)


@every_map
def test_per_sample_gradients_are_those_of_a_loop_over_images(map_: ConvMap) -> None:
    x, *parameters = _tensors(map_, images=3)
    named = {name: p.detach() for name, p in zip(("weight", "bias"), parameters, strict=False)}

    def loss(named: dict[str, Tensor], image: Tensor) -> Tensor:
        return map_(image, named["weight"], named.get("bias")).square().sum()

    at_once, inputs = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0))(named, x.detach())
    for i, image in enumerate(x.detach()):
        leaves = [image.clone().requires_grad_(), *parameters]
        z = map_(*leaves)
        input_gradient, *wanted = gradients(z, 2 * z.detach(), *leaves)
        close(inputs[i], input_gradient)
        for name, expected in zip(named, wanted, strict=True):
            close(at_once[name][i], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("map_", [m for m in PLAIN if m.bias], ids=str)
@pytest.mark.parametrize("mapped", [mapped for mapped in product((0, None), repeat=3) if mapped != (None,) * 3], ids=str)
def test_mapping_over_any_of_the_arguments_is_a_loop_over_them(
    map_: ConvMap, dtype: torch.dtype, mapped: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("affine_divergence.functional._channels._PART", 20)  # so that there are parts
    models = [_tensors(map_, images=2, dtype=dtype, seed=seed) for seed in range(3)]
    arguments = [models[0][i] if dim is None else torch.stack([m[i] for m in models]) for i, dim in enumerate(mapped)]
    arguments = [a.detach().requires_grad_() for a in arguments]
    at_once = vmap(map_, in_dims=mapped)(*arguments)
    upstream = torch.randn(at_once.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    actual = torch.autograd.grad(at_once, arguments, upstream)
    wanted = [torch.zeros_like(a, dtype=torch.float64) for a in arguments]
    for k in range(3):
        one = [a if dim is None else a[k] for a, dim in zip(arguments, mapped, strict=True)]
        z = map_(*one)
        close(at_once[k], z, tolerance=2 * TOLERANCE[dtype])
        for gradient, total, dim in zip(torch.autograd.grad(z, one, upstream[k]), wanted, mapped, strict=True):
            (total if dim is None else total[k]).add_(gradient)
    for gradient, expected in zip(actual, wanted, strict=True):
        close(gradient, expected, tolerance=4 * TOLERANCE[dtype])


@every_map
def test_many_upstream_gradients_at_once_are_a_loop_over_them(map_: ConvMap) -> None:
    tensors = _tensors(map_, images=2)
    z = map_(*tensors)
    upstream = torch.randn(4, *z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1))
    at_once = torch.autograd.grad(z, tensors, upstream, is_grads_batched=True, retain_graph=True)
    for k, one in enumerate(upstream):
        for actual, wanted in zip(at_once, torch.autograd.grad(z, tensors, one, retain_graph=True), strict=True):
            close(actual[k], wanted)
