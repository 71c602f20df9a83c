# The two structural corrections of a transposed convolution, twins of torch.nn.functional.conv_transpose1d to 3d.
from __future__ import annotations

from typing import TYPE_CHECKING

from affine_divergence.functional._arguments import check_conv, check_eps, check_gain
from affine_divergence.functional._geometry import conv_transpose_geometry
from affine_divergence.functional._scale import affine_like, norm_like
from affine_divergence.functional._scaled_conv import scaled_conv

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def affine_like_conv_transpose2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_in c_out_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""Transposed convolution divided by the norm of what reaches each position: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1).

    patch_p are the inputs that reach output position p, each at the tap of W by which it does; taps without an input
    count as zeros. With it everything said of `affine_like_conv2d` holds: a gradient step on W and b moves every z_p by
    exactly −lr · gain² · ∂L/∂z_p plus what other positions contribute, and a position that no input reaches (a stride
    larger than the kernel, output_padding) gives gain · b. ‖patch_p‖² is the transposed convolution of Σ_c x_c² with ones.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_in, C_out/groups, K_h, K_w).
        bias: (C_out), or None; without one the self term is gain² · ‖patch_p‖²/(‖patch_p‖² + 1).
        stride: as in `F.conv_transpose2d`.
        padding: as in `F.conv_transpose2d`.
        output_padding: as in `F.conv_transpose2d`.
        groups: as in `F.conv_transpose2d`; every group has a norm of its own.
        dilation: as in `F.conv_transpose2d`.
        gain: multiplies the whole map, bias included. At 1 outputs are about √d and steps about d times smaller than those
            of `F.conv_transpose2d` on inputs of unit variance, d the number of inputs that reach a position: raise the
            learning rate (`affine_divergence.matching_lr`) or the gain.

    Returns:
        (N, C_out, H_out, W_out), in the dtype that `F.conv_transpose2d` returns; more in `affine_like_conv2d`.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, an option is out of its range, or gain is not positive and finite.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight = torch.tensor([2.0, 2.0]).reshape(2, 1, 1), torch.ones(2, 1, 1, 2)
    >>> affine_like_conv_transpose2d(x, weight, torch.tensor([2.0]))  # (2 + 2 + 2)/√(8 + 1) at both positions
    tensor([[[2., 2.]]])
    """
    check_conv(x, weight, bias, 2, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def affine_like_conv_transpose1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_in c_out_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`affine_like_conv_transpose2d` in one dimension: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1), per position and group.

    x (N, C_in, L) or (C_in, L), weight (C_in, C_out/groups, K) and bias (C_out) give (N, C_out, L_out);
    options, dtypes and errors are those of `F.conv_transpose1d` and `affine_like_conv_transpose2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[2.0, 2.0]]), torch.tensor([[[1.0, 1.0]]])
    >>> affine_like_conv_transpose1d(x, weight, torch.tensor([1.0]))  # in the middle (2 + 2 + 1)/√(8 + 1)
    tensor([[1.3416, 1.6667, 1.3416]])
    """
    check_conv(x, weight, bias, 1, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def affine_like_conv_transpose3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_in c_out_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`affine_like_conv_transpose2d` in three dimensions: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1), per position and group.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_in, C_out/groups, K_d, K_h, K_w) and bias (C_out) give
    (N, C_out, D_out, H_out, W_out); options, dtypes and errors are those of `F.conv_transpose3d` and `affine_like_conv_transpose2d`.

    >>> import torch
    >>> x, weight = torch.tensor([2.0, 2.0]).reshape(2, 1, 1, 1), torch.ones(2, 1, 1, 1, 2)
    >>> affine_like_conv_transpose3d(x, weight, torch.tensor([2.0]))  # (2 + 2 + 2)/√(8 + 1)
    tensor([[[[2., 2.]]]])
    """
    check_conv(x, weight, bias, 3, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, affine_like(check_gain(gain)))


def norm_like_conv_transpose2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_in c_out_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""Transposed convolution of what reaches each position, divided by its norm: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b).

    patch_p are the inputs that reach output position p, as in `affine_like_conv_transpose2d`. At ε = 0 a gradient step
    moves the z_p of every position that an input other than zero reaches by exactly −lr · 2 gain² · ∂L/∂z_p (gain² without
    a bias), plus what other positions contribute; where none does z_p is gain · b.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_in, C_out/groups, K_h, K_w).
        bias: (C_out), or None.
        stride: as in `F.conv_transpose2d`.
        padding: as in `F.conv_transpose2d`.
        output_padding: as in `F.conv_transpose2d`.
        groups: as in `F.conv_transpose2d`; every group has a norm of its own.
        dilation: as in `F.conv_transpose2d`.
        gain: multiplies the whole map, bias included. At 1 outputs and steps are smaller than those of
            `F.conv_transpose2d`, as in `affine_like_conv_transpose2d`.
        eps: added to the squared norm under the root; None and 0.0 as in `norm_like_conv2d`.

    Returns:
        (N, C_out, H_out, W_out), in the dtype that `F.conv_transpose2d` returns; more in `norm_like_conv2d`.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, or an option is not a number.
        ValueError: the shapes do not fit, an option is out of its range, gain is not positive and finite, or eps is
            negative.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> x, weight = torch.tensor([3.0, 4.0]).reshape(2, 1, 1), torch.ones(2, 1, 1, 2)
    >>> norm_like_conv_transpose2d(x, weight, torch.tensor([2.0]), eps=0.0)  # (3 + 4)/√25 + 2 at both positions
    tensor([[[3.4000, 3.4000]]])
    """
    check_conv(x, weight, bias, 2, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def norm_like_conv_transpose1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_in c_out_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`norm_like_conv_transpose2d` in one dimension: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b), per position and group.

    x (N, C_in, L) or (C_in, L), weight (C_in, C_out/groups, K) and bias (C_out) give (N, C_out, L_out);
    options, dtypes and errors are those of `F.conv_transpose1d` and `norm_like_conv_transpose2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[[1.0, 1.0]]])
    >>> norm_like_conv_transpose1d(x, weight, torch.tensor([1.0]), eps=0.0)  # in the middle (3 + 4)/√25 + 1
    tensor([[2.0000, 2.4000, 2.0000]])
    """
    check_conv(x, weight, bias, 1, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))


def norm_like_conv_transpose3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_in c_out_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
    output_padding: int | tuple[int, ...] = 0,
    groups: int = 1,
    dilation: int | tuple[int, ...] = 1,
    *,
    gain: float = 1.0,
    eps: float | None = None,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`norm_like_conv_transpose2d` in three dimensions: z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b), per position and group.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_in, C_out/groups, K_d, K_h, K_w) and bias (C_out) give
    (N, C_out, D_out, H_out, W_out); options, dtypes and errors are those of `F.conv_transpose3d` and `norm_like_conv_transpose2d`.

    >>> import torch
    >>> x, weight = torch.tensor([3.0, 4.0]).reshape(2, 1, 1, 1), torch.ones(2, 1, 1, 1, 2)
    >>> norm_like_conv_transpose3d(x, weight, torch.tensor([2.0]), eps=0.0)  # (3 + 4)/√25 + 2
    tensor([[[[3.4000, 3.4000]]]])
    """
    check_conv(x, weight, bias, 3, groups, transposed=True)
    geometry = conv_transpose_geometry(weight.shape[2:], stride, padding, output_padding, groups, dilation)
    return scaled_conv(x, weight, bias, geometry, norm_like(check_gain(gain), check_eps(eps)))
