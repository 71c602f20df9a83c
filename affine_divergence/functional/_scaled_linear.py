# z_i = c·s_i·(W x_i + b), or c·(s_i·W x_i + b), with s_i = (‖x_i‖² + offset)^(−1/2): what the affine-like and the norm-like map share.
#
# Layout: x (…, d_in), weight (d_out, d_in), bias (d_out), s and t = c·s (…, 1). With the upstream g = ∂L/∂z and u = Wᵀg
#   ∂W = Σ t g xᵀ      ∂b = Σ t g  or  c Σ g      ∂x = t (u − s² (u·x + g·b) x),  without g·b where s does not multiply the bias.
# Nothing is saved but the inputs: s costs one pass over x and is made again in the backward.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional._autocast import promoted, without_autocast
from affine_divergence.functional._in_place import as_base, may_overwrite
from affine_divergence.functional._rows import as_matrix, composes, linear, row_sqnorm, weighted_sum

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.functional._scale import Scale


def scaled_linear(
    x: Float[Tensor, "*rows d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None, scale: Scale
) -> Float[Tensor, "*rows d_out"]:
    """The map itself, in the dtype that `F.linear` would return, or in the promoted one where `F.linear` refuses mixed dtypes."""
    device = x.device.type
    x, weight, bias = promoted(x, weight, bias)
    with without_autocast(device):
        if composes():
            # Inductor fuses the plain expression; and a Function's own jvp is a constant to a second forward derivative: zero, silently.
            return _composed(x, weight, bias, scale)
        z: Tensor = _ScaledLinear.apply(x, weight, bias, scale)
        return z


def _composed(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale) -> Tensor:
    _, t = scale(row_sqnorm(x))
    z = linear((x * t).to(weight.dtype), weight)
    return z if bias is None else (z + (t if scale.scales_bias else scale.gain) * bias).to(weight.dtype)


class _ScaledLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale) -> Tensor:
        x = x.contiguous()  # the order of a sum must not depend on strides
        _, t = scale(row_sqnorm(x))
        if x.dtype == weight.dtype == t.dtype and (scale.scales_bias or bias is None):
            z = linear(x, weight, bias)
            return _base(z.mul_(t)) if may_overwrite() else z * t
        # Scaled first: in float16 W x overflows (x = 300, d = 512, W = 1) although z is 22.6.
        x = (x * t).to(weight.dtype)
        if bias is None:
            return _base(linear(x, weight))
        if not scale.scales_bias:
            return _base(linear(x, weight, scale.gain * bias))
        # Not in place: vmap refuses that for a mapped bias alone, and it is slower here (20 ms against 12 at 4096 × 1024 bfloat16).
        return torch.addcmul(linear(x, weight), t, bias).to(weight.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = upstream
        x, weight, bias = ctx.saved_tensors
        with without_autocast(x.device.type):
            return *_gradients(g, x, weight, bias, ctx.scale, ctx.needs_input_grad), None


def _base(z: Tensor) -> Tensor:
    # The rank tells whether F.linear returned a view. z._is_view() would differ when a selective checkpoint computes z again.
    return z if z.dim() == 2 else as_base(z)


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    shape, x, g = x.shape, as_matrix(x.contiguous()), as_matrix(g)
    s, t = scale(row_sqnorm(x))
    x_grad = weight_grad = bias_grad = None
    if needed[2]:
        bias_grad = (weighted_sum(t, g) if scale.scales_bias else scale.gain * g.sum(0)).to(g.dtype)
    # g is scaled once for all where it is the smaller factor: a temporary less. Not in float16, where t·g would flush to zero,
    # and not at ε = 0, where t is unbounded.
    scales_g = g.dtype == t.dtype and g.shape[-1] <= x.shape[-1] and scale.offset > 0.0
    if scales_g:
        g = t * g
    if needed[1]:
        weight_grad = g.mT @ (x if scales_g else (t * x).to(g.dtype))
    if needed[0]:
        u = g @ weight
        radial = (u.to(t.dtype) * x).sum(-1, keepdim=True)  # the product of two float16 overflows at 256 · 256
        if scale.scales_bias and bias is not None:
            radial = radial + (g @ bias).unsqueeze(-1)
        # s·(s·radial), not s²·radial: at ε = 0 a row of norm 1e-20 has an s² beyond float32.
        x_grad = torch.addcmul(u, x, -s * (s * radial))
        x_grad = (x_grad if scales_g else t * x_grad).to(x.dtype).reshape(shape)
    return x_grad, weight_grad, bias_grad
