# The batch correction of convolutions: torch.nn.functional.conv1d to conv3d, with the weight gradient that moves all positions at once.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from affine_divergence.gradient._batch import BatchGradients
from affine_divergence.gradient._carry import carried
from affine_divergence.gradient._convolution import checked_convolution

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from torch.distributed import ProcessGroup


def batch_corrected_conv2d(
    x: Float[Tensor, "*n c_in h w"],
    weight: Float[Tensor, "c_out c_in_per_group kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    damping: float = 1e-3,
    process_group: ProcessGroup | None = None,
) -> Float[Tensor, "*n c_out h_out w_out"]:
    r"""`F.conv2d`, whose weight and bias get the gradient that moves every position by its own −lr · ∂L/∂z_p at once.

    It is `batch_corrected_linear` of the patches: with X̃ the rows [patch_p; 1] of all N positions of all images, per group,
    the gradient is the ridge solution gᵀ (X̃X̃ᵀ + λI)⁻¹ X̃ = gᵀ X̃ (X̃ᵀX̃ + λI)⁻¹, λ = damping · trace(X̃X̃ᵀ)/N, by the smaller
    matrix. With d = C_in/groups · K_h · K_w and o = C_out/groups the dual form (N ≤ d + 1) costs N²(d + o) + N³/6, the primal
    one (N + o) d² + d³/6, per group, where the convolution and its gradients take 3 N d o. There are mostly many more positions
    than d + 1: then a step cannot move all of them as wanted, and moves them as near to it as it can.

    Patches are unfolded a few images at a time, 32 MiB of them, or one image's; beyond that the memory is some matrices of
    (d + 1)², or N², in float64. Padding with zeros belongs to the patch.

    Args:
        x: (N, C_in, H, W) or (C_in, H, W).
        weight: (C_out, C_in/groups, K_h, K_w).
        bias: (C_out), or None.
        stride: as in `F.conv2d`.
        padding: as in `F.conv2d`: numbers, "valid" or "same".
        dilation: as in `F.conv2d`.
        groups: as in `F.conv2d`; each has its own patches, its own solution and its own λ.
        damping: λ relative to the mean squared length of the rows; 0.0 is the least-norm solution.
        process_group: the processes whose images are one batch, as in `batch_corrected_linear`.

    Returns:
        (N, C_out, H_out, W_out), what `F.conv2d` returns.

    Raises:
        TypeError: x, weight or bias is not a real floating-point tensor, an option is not a number, or process_group is none.
        ValueError: the shapes do not fit, or an option is out of its range.
        RuntimeError: as in `batch_corrected_linear`.

    Source: as of `batch_corrected_linear`.

    >>> import torch
    >>> x, weight = torch.tensor([[[3.0, 1.0], [1.0, 0.0]]]), torch.zeros(1, 1, 1, 2, requires_grad=True)
    >>> target = torch.tensor([[[1.0], [-1.0]]])
    >>> (0.5 * (batch_corrected_conv2d(x, weight, damping=0.0) - target) ** 2).sum().backward()
    >>> torch.nn.functional.conv2d(x, -weight.grad).round(decimals=4)  # the change of z at lr 1: what is wanted
    tensor([[[ 1.],
             [-1.]]])
    """
    return _corrected(2, x, weight, bias, stride, padding, dilation, groups, damping, process_group)


def batch_corrected_conv1d(
    x: Float[Tensor, "*n c_in l"],
    weight: Float[Tensor, "c_out c_in_per_group k"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    damping: float = 1e-3,
    process_group: ProcessGroup | None = None,
) -> Float[Tensor, "*n c_out l_out"]:
    r"""`batch_corrected_conv2d` in one dimension.

    x (N, C_in, L) or (C_in, L), weight (C_out, C_in/groups, K) and bias (C_out) give what `F.conv1d` gives; options, costs
    and errors are those of `batch_corrected_conv2d`.

    >>> import torch
    >>> x, weight = torch.tensor([[3.0, 1.0, 0.0]]), torch.zeros(1, 1, 2, requires_grad=True)
    >>> target = torch.tensor([[1.0, -1.0]])
    >>> (0.5 * (batch_corrected_conv1d(x, weight, damping=0.0) - target) ** 2).sum().backward()
    >>> torch.nn.functional.conv1d(x, -weight.grad).round(decimals=4)  # the change of z at lr 1: what is wanted
    tensor([[ 1., -1.]])
    """
    return _corrected(1, x, weight, bias, stride, padding, dilation, groups, damping, process_group)


def batch_corrected_conv3d(
    x: Float[Tensor, "*n c_in d h w"],
    weight: Float[Tensor, "c_out c_in_per_group kd kh kw"],
    bias: Float[Tensor, " c_out"] | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    *,
    damping: float = 1e-3,
    process_group: ProcessGroup | None = None,
) -> Float[Tensor, "*n c_out d_out h_out w_out"]:
    r"""`batch_corrected_conv2d` in three dimensions.

    x (N, C_in, D, H, W) or (C_in, D, H, W), weight (C_out, C_in/groups, K_d, K_h, K_w) and bias (C_out) give what `F.conv3d`
    gives; options, costs and errors are those of `batch_corrected_conv2d`.

    >>> import torch
    >>> x, weight = torch.ones(1, 2, 2, 2), torch.zeros(1, 1, 2, 2, 2, requires_grad=True)
    >>> batch_corrected_conv3d(x, weight, damping=1.0).sum().backward()
    >>> torch.nn.functional.conv3d(x, -weight.grad).round(decimals=4)  # the change of z at lr 1: −1/(1 + damping)
    tensor([[[[-0.5000]]]])
    """
    return _corrected(3, x, weight, bias, stride, padding, dilation, groups, damping, process_group)


def _corrected(
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    damping: float,
    process_group: ProcessGroup | None,
) -> Tensor:
    product, geometry = checked_convolution(dims, x, weight, bias, stride, padding, dilation, groups)
    return carried(product, x, weight, bias, BatchGradients.of(geometry, damping, process_group))
