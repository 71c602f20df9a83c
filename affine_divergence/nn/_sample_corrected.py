# Sample-corrected layers: torch's own linear and convolutional layers, each sample's part of the gradient divided by its squared norm.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch

from affine_divergence.gradient import (
    sample_corrected_conv1d,
    sample_corrected_conv2d,
    sample_corrected_conv3d,
    sample_corrected_linear,
)
from affine_divergence.nn._padding import padded

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class SampleCorrectedLinear(torch.nn.Linear):
    r"""`nn.Linear` whose gradients are divided, row by row, by ‖x_i‖² + 1: ∂W = Σ_i g_i x_iᵀ/(‖x_i‖² + 1), ∂b = Σ_i g_i/(‖x_i‖² + 1).

    A gradient step moves every z_i by −lr · ∂L/∂z_i, plus what the other rows contribute. It is a `torch.nn.Linear` in everything
    else: constructor, initialisation, state_dict, output and input gradient, bit for bit. The formula where a bias is absent or a
    parameter frozen, and what is refused: `affine_divergence.gradient.sample_corrected_linear`. Several calls of one layer, or
    micro-batches, add up as with nn.Linear. Steps are about d_in + 1 times smaller than those of nn.Linear on inputs of unit
    variance, so that learning rates are to be tuned anew. Adam undoes most of the correction: it divides each gradient by its own
    size and keeps only the relative weights of the rows. Use SGD.

    Args:
        in_features: d_in, the size of the last dimension of x.
        out_features: d_out.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.

    Shape: x (…, d_in) → z (…, d_out).

    >>> layer = SampleCorrectedLinear(2, 1)
    >>> layer(torch.tensor([[3.0, 3.0]])).sum().backward()
    >>> layer.weight.grad, layer.bias.grad  # x and 1, over 18 + 1
    (tensor([[0.1579, 0.1579]]), tensor([0.0526]))
    """

    def forward(self, input: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """(…, d_in) → (…, d_out)."""
        return sample_corrected_linear(input, self.weight, self.bias)


class _SampleCorrectedConv(torch.nn.modules.conv._ConvNd):
    _function: ClassVar[Callable[..., Tensor]]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, padding = padded(self, input)
        return self._function(x, weight, bias, self.stride, padding, self.dilation, self.groups)


class SampleCorrectedConv1d(_SampleCorrectedConv, torch.nn.Conv1d):
    r"""`nn.Conv1d` whose gradients are divided, position by position, by ‖patch_p‖² + 1: `SampleCorrectedConv2d` in one dimension.

    Constructor, initialisation, state_dict, output and input gradient are those of `torch.nn.Conv1d`.

    Shape: (N, C_in, L) → (N, C_out, L_out), or both without N.

    >>> layer = SampleCorrectedConv1d(1, 1, 3)
    >>> layer(torch.tensor([[1.0, 2.0, 2.0]])).sum().backward()
    >>> layer.weight.grad  # over 9 + 1
    tensor([[[0.1000, 0.2000, 0.2000]]])
    """

    _function = staticmethod(sample_corrected_conv1d)


class SampleCorrectedConv2d(_SampleCorrectedConv, torch.nn.Conv2d):
    r"""`nn.Conv2d` whose gradients are divided by ‖patch_p‖² + 1: ∂W = Σ_p g_p patch_pᵀ/(‖patch_p‖² + 1), ∂b likewise.

    A gradient step moves the output at every position by −lr · ∂L/∂z_p, plus what the other positions and images contribute. It is
    a `torch.nn.Conv2d` in everything else: constructor, initialisation, state_dict, output and input gradient, bit for bit.
    Padding with other than zeros is done first and counts. The formula where a bias is absent or a parameter frozen, and what is
    refused: `affine_divergence.gradient.sample_corrected_conv2d`. Several calls of one layer, or micro-batches, add up as with
    nn.Conv2d. With d = C_in/groups · K_h · K_w, steps are about d + 1 times smaller than those of nn.Conv2d on inputs of unit
    variance, so that learning rates are to be tuned anew.

    Args:
        in_channels: as in `nn.Conv2d`, and so all up to dtype.
        out_channels: C_out.
        kernel_size: one number, or two.
        stride: one number, or two.
        padding: numbers, "valid" or "same".
        dilation: one number, or two.
        groups: of channels.
        bias: whether there is a b.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
        device: of the parameters.
        dtype: of the parameters.

    Shape: (N, C_in, H, W) → (N, C_out, H_out, W_out), or both without N.

    >>> layer = SampleCorrectedConv2d(1, 1, 2)
    >>> layer(torch.tensor([[[2.0, 2.0], [0.0, 1.0]]])).sum().backward()
    >>> layer.weight.grad, layer.bias.grad  # the patch, and 1, over 9 + 1
    (tensor([[[[0.2000, 0.2000],
              [0.0000, 0.1000]]]]), tensor([0.1000]))
    """

    _function = staticmethod(sample_corrected_conv2d)


class SampleCorrectedConv3d(_SampleCorrectedConv, torch.nn.Conv3d):
    r"""`nn.Conv3d` whose gradients are divided, position by position, by ‖patch_p‖² + 1: `SampleCorrectedConv2d` in three dimensions.

    Constructor, initialisation, state_dict, output and input gradient are those of `torch.nn.Conv3d`.

    Shape: (N, C_in, D, H, W) → (N, C_out, D_out, H_out, W_out), or both without N.

    >>> layer = SampleCorrectedConv3d(1, 1, (1, 2, 2))
    >>> layer(torch.ones(1, 1, 2, 2)).sum().backward()
    >>> layer.bias.grad  # 1/(4 + 1)
    tensor([0.2000])
    """

    _function = staticmethod(sample_corrected_conv3d)
