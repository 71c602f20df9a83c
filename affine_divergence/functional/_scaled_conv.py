# z_p = c·s_p·(W·patch_p + b), or c·(s_p·W·patch_p + b), with s_p = (‖patch_p‖² + offset)^(−1/2) per position and group.
#
# Layout: x (N, C_in, *size), weight as in torch, y = W·patch (+ b where s multiplies it) and z (N, C_out, *out), s and t = c·s
# (N, groups, *out). With the upstream g = ∂L/∂z and g̃ = t g
#   ∂W, ∂b and the first part of ∂x: the backward of the plain convolution at g̃      (∂b = c Σ g where s does not multiply b)
#   ∂x −= x · spread(s² Σ_o g̃_o y_o): every patch is pulled along itself, spread being the adjoint of the sum over patches.
# Saved beyond the inputs: y and t. Not z, which an activation after it may overwrite.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional._autocast import promoted, without_autocast
from affine_divergence.functional._channels import at_once, channel_dot, channel_sqnorm, parts, scale_channels, subtract_scaled
from affine_divergence.functional._geometry import Geometry
from affine_divergence.functional._in_place import may_overwrite, product
from affine_divergence.functional._rows import composes, wide_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from affine_divergence.functional._scale import Scale


def scaled_conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale) -> Tensor:
    """The map itself, in the dtype that torch's convolution would return, or in the promoted one where it refuses mixed dtypes."""
    device = x.device.type
    x, weight, bias = promoted(x, weight, bias)
    batched = x.dim() == weight.dim()
    geometry.check_size(x.shape[2 if batched else 1 :])
    with without_autocast(device):
        x, geometry = geometry.padded(x if batched else x.unsqueeze(0))
        if composes():
            # Inductor fuses the plain expression; and a Function's own jvp is a constant to a second forward derivative: zero, silently.
            z, _, _ = _forward(x, weight, bias, geometry, scale)
        else:
            z, _, _ = _ScaledConv.apply(x, weight, bias, geometry, scale)
    return z if batched else z.squeeze(0)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """The map z, with y and t."""
    y = _product(x, weight, bias, geometry, scale)
    t = _patch_scale(x, y, geometry, scale)
    z = scale_channels(y, t, None if bias is None or scale.scales_bias else scale.gain * bias.to(t.dtype))
    return z.to(weight.dtype), y, t


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale) -> Tensor:
    dtype = _product_dtype(weight)
    return geometry.convolve(x.to(dtype), weight.to(dtype), bias.to(dtype) if scale.scales_bias and bias is not None else None)


def _patch_scale(x: Tensor, y: Tensor, geometry: Geometry, scale: Scale) -> Tensor:
    def of(images: Tensor) -> Tensor:
        return scale(geometry.patch_sums(channel_sqnorm(images, geometry.groups)))[1]

    if at_once(x):
        return of(x)
    if not may_overwrite():
        return torch.cat([of(images) for (images,) in parts(x)])
    t = torch.empty_like(y[:, : geometry.groups], dtype=wide_dtype(x.dtype))  # in the memory format of y
    for images, out in parts(x, t):
        out.copy_(of(images))
    return t


def _product_dtype(weight: Tensor) -> torch.dtype:
    # In float16 W·patch overflows (300 × 512 ones) although z is 22.6, and t·g flushes to zero. A power of two per image would save one
    # patch at the price of another, darker one of the same image: the products are taken in float32, whose range holds all of them.
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


class _ScaledConv(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, scale: Scale
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(x, weight, bias, geometry, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.geometry, ctx.scale = inputs
        z, y, t = output
        ctx.mark_non_differentiable(y, t)
        ctx.set_materialize_grads(False)
        # Only the radial part of ∂x reads y, and where y is wider than z it is made again.
        keeps_y = ctx.needs_input_grad[0] and y.dtype == z.dtype
        ctx.save_for_backward(x, weight, bias, y if keeps_y else None, t)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        g = upstream[0]
        x, weight, bias, y, t = ctx.saved_tensors
        if g is None:
            return None, None, None, None, None
        with without_autocast(x.device.type):
            again = torch.is_grad_enabled()  # a second derivative goes through y and t too
            if again or (y is None and ctx.needs_input_grad[0]):
                y = _product(x, weight, bias, ctx.geometry, ctx.scale)
            if again:
                t = _patch_scale(x, y, ctx.geometry, ctx.scale)
            gradients = _gradients(g, x, weight, bias, y, t, ctx.geometry, ctx.scale, ctx.needs_input_grad)
        return *gradients, None, None


def _gradients(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    t: Tensor,
    geometry: Geometry,
    scale: Scale,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = _product_dtype(weight)
    scaled = scale_channels(g, t).to(dtype)
    products = (needed[0], needed[1], needed[2] and scale.scales_bias)
    x_grad, weight_grad, bias_grad = geometry.convolve_backward(scaled, x.to(dtype), weight.to(dtype), products)
    if needed[2] and not scale.scales_bias:
        bias_grad = scale.gain * g.sum([0, *range(2, g.dim())])
    if x_grad is not None and y is not None:
        x_grad = x_grad.to(torch.promote_types(x_grad.dtype, x.dtype))
        x_grad = _without_radial(x_grad, x, scaled, y, t, geometry, scale).to(x.dtype)
    weight_grad = None if weight_grad is None else weight_grad.to(weight.dtype)
    bias_grad = None if bias_grad is None else bias_grad.to(weight.dtype)
    return x_grad, weight_grad, bias_grad


def _without_radial(x_grad: Tensor, x: Tensor, scaled: Tensor, y: Tensor, t: Tensor, geometry: Geometry, scale: Scale) -> Tensor:
    results = []
    for of_grad, of_x, of_scaled, of_y, of_t in parts(x_grad, x, scaled, y, t):
        s = of_t if scale.gain == 1.0 else of_t / scale.gain
        along = product(product(channel_dot(of_scaled, of_y, geometry.groups), s), s)
        results.append(subtract_scaled(of_grad, of_x, geometry.patch_spread(along, x.shape[2:])))
    if len(results) == 1:
        return results[0]
    return x_grad if may_overwrite() else torch.cat(results)
