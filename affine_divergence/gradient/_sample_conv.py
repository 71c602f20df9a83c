# The sample correction of a convolution: every position's part of the weight gradient divided by the squared norm of its patch.
#
#   ∂L/∂W = Σ_p g_p patch_pᵀ/(‖patch_p‖² + 1)        ∂L/∂b = Σ_p g_p/(‖patch_p‖² + 1)        over all images, positions and groups
#
# Layout: x (N, C_in, *size), g = ∂L/∂z (N, C_out, *out), the divisors (N, groups, *out), float32 or wider. They are sums over windows
# of Σ_c x_c², and the sums over p are torch's own weight gradient at the scaled g: nothing is unfolded.
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.functional._channels import channel_sqnorm, scale_channels
from affine_divergence.functional._geometry import Geometry
from affine_divergence.functional._rows import wide_dtype
from affine_divergence.gradient._carry import carried
from affine_divergence.gradient._convolution import checked_convolution

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.gradient._carry import Pair


def sample_corrected_conv2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_out c_in_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""`F.conv2d` whose weight and bias gradients are divided, position by position, by ‖patch_p‖² + 1.

    A gradient step on W and b then moves every z_p by exactly −lr · ∂L/∂z_p, plus what the other positions and images
    contribute: δz_p = −lr Σ_q g_q (patch_q·patch_p + 1)/(‖patch_q‖² + 1). Patches of one image overlap, so that the contribution
    of the others is large here. The output and ∂L/∂x are those of `F.conv2d`, bit for bit, and every optimiser works on the
    corrected gradients

        ∂W = Σ_q g_q patch_qᵀ/(‖patch_q‖² + 1)        ∂b = Σ_q g_q/(‖patch_q‖² + 1),        g_q = ∂L/∂z_q

    Every group of channels has its own patch. Without a bias, or with one that does not learn, the divisor is ‖patch_q‖² and a
    patch of zeros contributes 0. With a weight that does not learn it is 1. They are gradients of no loss: they are
    differentiated once, in reverse mode only.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_out, C_in/groups, K_h, K_w).
        bias: (C_out), or None.
        stride: as in `F.conv2d`.
        padding: as in `F.conv2d`: numbers, "valid" or "same"; padded zeros add nothing to the norm.
        dilation: as in `F.conv2d`.
        groups: as in `F.conv2d`.

    Returns:
        (N, C_out, H_out, W_out), what `F.conv2d` returns. Squared norms are taken in float32 or wider, and float16 gradients are
        made in float32; a patch whose squared norm overflows that dtype (a norm above 1.8e19 in float32) contributes 0 to the
        gradients, and so does without a bias one whose squared norm is no normal number in it (a norm below 1.1e-19). Where
        everything is frozen, and in a graph made by `torch.export`, it is `F.conv2d`.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, or an option is out of its range.
        RuntimeError: where `F.conv2d` raises, as for mixed dtypes; and where weight or bias learns, in forward mode and when
            the gradients are differentiated again.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x = torch.tensor([[[2.0, 2.0], [0.0, 1.0]]])
    >>> weight, bias = torch.zeros(1, 1, 2, 2, requires_grad=True), torch.zeros(1, requires_grad=True)
    >>> sample_corrected_conv2d(x, weight, bias).sum().backward()
    >>> weight.grad, bias.grad  # the patch, and 1, over 9 + 1
    (tensor([[[[0.2000, 0.2000],
              [0.0000, 0.1000]]]]), tensor([0.1000]))
    """
    return _sample_corrected(2, x, weight, bias, stride, padding, dilation, groups)


def sample_corrected_conv1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_out c_in_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`F.conv1d` with the gradients of `sample_corrected_conv2d`: ∂W = Σ_q g_q patch_qᵀ/(‖patch_q‖² + 1), ∂b likewise.

    x (N, C_in, L) or (C_in, L), weight (C_out, C_in/groups, K) and bias (C_out) give (N, C_out, L_out); options, dtypes and
    errors are those of `F.conv1d` and `sample_corrected_conv2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[2.0, 1.0, 0.0]]), torch.zeros(1, 1, 2, requires_grad=True)
    >>> sample_corrected_conv1d(x, weight).sum().backward()
    >>> weight.grad  # (2, 1)/5 + (1, 0)/1
    tensor([[[1.4000, 0.2000]]])
    """
    return _sample_corrected(1, x, weight, bias, stride, padding, dilation, groups)


def sample_corrected_conv3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_out c_in_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`F.conv3d` with the gradients of `sample_corrected_conv2d`: ∂W = Σ_q g_q patch_qᵀ/(‖patch_q‖² + 1), ∂b likewise.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_out, C_in/groups, K_d, K_h, K_w) and bias (C_out) give
    (N, C_out, D_out, H_out, W_out); options, dtypes and errors are those of `F.conv3d` and `sample_corrected_conv2d`.

    >>> import torch
    >>> x, bias = torch.ones(1, 1, 2, 2), torch.zeros(1, requires_grad=True)
    >>> sample_corrected_conv3d(x, torch.zeros(1, 1, 1, 2, 2, requires_grad=True), bias).sum().backward()
    >>> bias.grad  # 1/(4 + 1)
    tensor([0.2000])
    """
    return _sample_corrected(3, x, weight, bias, stride, padding, dilation, groups)


def _sample_corrected(
    dims: int, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    product, geometry = checked_convolution(dims, x, weight, bias, stride, padding, dilation, groups)
    return carried(product, x, weight, bias, _SampleGradients(geometry))


@dataclass(frozen=True)
class _SampleGradients:
    geometry: Geometry

    def __call__(self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool]) -> Pair:
        if g.dim() < weight.dim():
            g, x = g.unsqueeze(0), x.unsqueeze(0)
        if not needed[0]:
            return None, g.sum([0, *range(2, g.dim())], dtype=wide_dtype(g.dtype))
        x, geometry = self.geometry.padded(x)
        t = _reciprocal(geometry.patch_sums(channel_sqnorm(x, geometry.groups)), biased=needed[1])
        # In float16 t·g flushes to zero, and a power of two that saves it overflows W's gradient at another patch.
        dtype = torch.float32 if g.dtype == torch.float16 else g.dtype
        scaled = scale_channels(g, t).to(dtype)
        _, weight_grad, bias_grad = geometry.convolve_backward(scaled, x.to(dtype), weight.to(dtype), (False, *needed))
        return weight_grad, bias_grad


def _reciprocal(sqnorm: Tensor, *, biased: bool) -> Tensor:
    """1/(sqnorm + 1), or without a bias 1/sqnorm, and 0 of one that is not a normal number."""
    if biased:
        return (sqnorm + 1.0).reciprocal()
    normal = sqnorm >= torch.finfo(sqnorm.dtype).tiny
    return torch.where(normal, torch.where(normal, sqnorm, 1.0).reciprocal(), 0.0)
