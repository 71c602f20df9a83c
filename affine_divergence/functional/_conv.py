# The two structural corrections of a convolution, twins of torch.nn.functional.conv1d to conv3d.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_conv, check_eps, check_gain
from affine_divergence.functional._geometry import conv_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.functional._scaled_conv import scaled_conv

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def affine_like_conv2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_out c_in_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""Convolution divided by the norm of each patch: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1), per position and group.

    A gradient step on W and b moves every z_p by exactly −lr · gain² · ∂L/∂z_p, plus what the other positions and images
    contribute; a plain convolution multiplies its own part by ‖patch_p‖² + 1. Patches of one image overlap, so that the
    contribution of the others is large here. Without a bias the 1 stays under the root and the self term is
    gain² · ‖patch_p‖²/(‖patch_p‖² + 1), below gain². The norms are a sum over windows of Σ_c x_c²: nothing is unfolded.

    It is the paper's PatchNorm. Two other methods share the name: Killeen's patch-normalised convolution, and Dual
    PatchNorm, which is layer normalisation around the patch embedding of a vision transformer.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_out, C_in/groups, K_h, K_w).
        bias: (C_out), or None.
        stride: as in `F.conv2d`.
        padding: as in `F.conv2d`: numbers, "valid" or "same"; padded zeros add nothing to the norm.
        dilation: as in `F.conv2d`.
        groups: as in `F.conv2d`; every group has its own patch, and a norm of its own.
        gain: multiplies the whole map, bias included. With d = C_in/groups · K_h · K_w, at 1 the output is about √d times
            smaller than that of `F.conv2d` on inputs of unit variance, and a step about d times smaller: raise the
            learning rate (`affine_divergence.matching_lr`) or take gain √(d + 1).

    Returns:
        (N, C_out, H_out, W_out), in the dtype that `F.conv2d` returns and in the memory format of its output. Norms are
        taken in float32 or wider. Mixed dtypes, which `F.conv2d` refuses outside autocast, are promoted, and so are those
        with float64 among them under autocast. A patch whose squared norm overflows that dtype (a norm above 1.8e19 in
        float32) comes out as 0, or as NaN where W·patch + b overflows too.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, an option is out of its range, or gain is not positive and finite.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight = torch.tensor([[[2.0, 2.0], [0.0, 0.0]]]), torch.tensor([[[[1.0, 3.0], [0.0, 0.0]]]])
    >>> affine_like_conv2d(x, weight, torch.tensor([1.0]))  # (2 + 6 + 1)/√(8 + 1)
    tensor([[[3.]]])
    """
    check_conv(x, weight, bias, 2, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def affine_like_conv1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_out c_in_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`affine_like_conv2d` in one dimension: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1), per position and group.

    x (N, C_in, L) or (C_in, L), weight (C_out, C_in/groups, K) and bias (C_out) give (N, C_out, L_out);
    options, dtypes and errors are those of `F.conv1d` and `affine_like_conv2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[2.0, 2.0]]), torch.tensor([[[1.0, 3.0]]])
    >>> affine_like_conv1d(x, weight, torch.tensor([1.0]))  # (2 + 6 + 1)/√(8 + 1)
    tensor([[3.]])
    """
    check_conv(x, weight, bias, 1, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def affine_like_conv3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_out c_in_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`affine_like_conv2d` in three dimensions: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1), per position and group.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_out, C_in/groups, K_d, K_h, K_w) and bias (C_out) give
    (N, C_out, D_out, H_out, W_out); options, dtypes and errors are those of `F.conv3d` and `affine_like_conv2d`.

    >>> import torch
    >>> x, weight = torch.ones(1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2)
    >>> affine_like_conv3d(x, weight, torch.tensor([1.0]))  # (8 + 1)/√(8 + 1)
    tensor([[[[3.]]]])
    """
    check_conv(x, weight, bias, 3, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_out c_in_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""Convolution of each patch divided by its norm: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b), per position and group.

    At ε = 0 a gradient step moves the z_p of every patch that is not all zeros by exactly −lr · 2 gain² · ∂L/∂z_p (gain²
    without a bias), plus what the other positions and images contribute. A patch times a
    number gives the same. It cannot be written as a normalisation of x followed by a convolution, since
    patches that overlap divide the same pixel by different norms.

    Two other methods share the name PatchNorm: Killeen's patch-normalised convolution, and Dual PatchNorm in vision
    transformers.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_out, C_in/groups, K_h, K_w).
        bias: (C_out), or None.
        stride: as in `F.conv2d`.
        padding: as in `F.conv2d`: numbers, "valid" or "same"; padded zeros add nothing to the norm.
        dilation: as in `F.conv2d`.
        groups: as in `F.conv2d`; every group has its own patch, and a norm of its own.
        gain: multiplies the whole map, bias included. At 1 outputs and steps are smaller than those of `F.conv2d`, as in
            `affine_like_conv2d`.
        eps: added to the squared norm under the root. None is `torch.finfo(torch.float32).eps` whatever the dtype, so
            that precision does not change the function. At 0.0 a patch of zeros gives gain · b and passes no gradient
            to x.

    Returns:
        (N, C_out, H_out, W_out), in the dtype that `F.conv2d` returns and in the memory format of its output. Norms are
        taken in float32 or wider. Mixed dtypes, which `F.conv2d` refuses outside autocast, are promoted, and so are those
        with float64 among them under autocast. A patch whose squared norm overflows that dtype is treated as a patch of
        zeros, and at ε = 0 so is one whose squared norm underflows (a norm below 1e-23 in float32; below 1e-19 its gradient
        to x may overflow).

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, an option is out of its range, gain is not positive and finite, or eps is
            negative.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight = torch.ones(1, 2, 2), torch.tensor([[[[1.0, 3.0], [2.0, 0.0]]]])
    >>> norm_like_conv2d(x, weight, torch.tensor([1.0]))  # (1 + 3 + 2)/√4 + 1
    tensor([[[4.]]])
    """
    check_conv(x, weight, bias, 2, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def norm_like_conv1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_out c_in_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`norm_like_conv2d` in one dimension: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b), per position and group.

    x (N, C_in, L) or (C_in, L), weight (C_out, C_in/groups, K) and bias (C_out) give (N, C_out, L_out);
    options, dtypes and errors are those of `F.conv1d` and `norm_like_conv2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[[1.0, 3.0]]])
    >>> norm_like_conv1d(x, weight, torch.tensor([1.0]))  # (3 + 12)/√25 + 1
    tensor([[4.]])
    """
    check_conv(x, weight, bias, 1, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def norm_like_conv3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_out c_in_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`norm_like_conv2d` in three dimensions: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b), per position and group.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_out, C_in/groups, K_d, K_h, K_w) and bias (C_out) give
    (N, C_out, D_out, H_out, W_out); options, dtypes and errors are those of `F.conv3d` and `norm_like_conv2d`.

    >>> import torch
    >>> x, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
    >>> norm_like_conv3d(x, weight, torch.tensor([1.0]))  # 4/√4 + 1
    tensor([[[[3.]]]])
    """
    check_conv(x, weight, bias, 3, groups)
    geometry = conv_geometry(weight.shape[2:], stride, padding, dilation, groups)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))
