# PatchNorm convolutions: drop-in for torch.nn.Conv1d, Conv2d and Conv3d, not subclasses of them.
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

import affine_divergence.functional as AF
from affine_divergence.nn._padding import padded
from affine_divergence.nn._patch_norm import PatchNorm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.nn._patch_norm import Forms


class _PatchNormConv(PatchNorm):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        form: str = "affine-like",
        gain: float | str = 1.0,
        eps: float | None = None,
    ) -> None:
        plain = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        super().__init__(plain, form, gain, eps)

    def forward(self, input: Float[Tensor, "*n c_in *size"]) -> Float[Tensor, "*n c_out *size_out"]:
        """(N, C_in, *size) → (N, C_out, *size_out), or both without N."""
        x, padding = padded(self, input)
        return self._normalised(x, self.stride, padding, self.dilation, self.groups)


class PatchNormConv1d(_PatchNormConv):
    r"""Convolution over one axis, each patch divided by its norm: `PatchNormConv2d` in one dimension.

    Constructor, initialisation and state_dict are those of `torch.nn.Conv1d`, then form, gain and eps by name.

    Shape: (N, C_in, L) → (N, C_out, L_out), or both without N.

    >>> layer = PatchNormConv1d(2, 4, 3, form="norm-like")
    >>> layer
    PatchNormConv1d(2, 4, kernel_size=(3,), stride=(1,), form=norm-like, gain=1, eps=None)
    >>> tuple(layer(torch.ones(5, 2, 8)).shape)
    (5, 4, 6)
    """

    _plain = torch.nn.Conv1d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv1d, "norm-like": AF.norm_like_conv1d}


class PatchNormConv2d(_PatchNormConv):
    r"""Convolution divided by the norm of each patch, the paper's PatchNorm: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1).

    Constructor, initialisation and state_dict are those of `torch.nn.Conv2d`; form, gain and eps are not in the
    state_dict. The layer is not a subclass of `nn.Conv2d`, since tools that look for that type would treat it as a plain
    affine map. Every group of channels has its own patch and a norm of its own; padding with other than zeros is done
    first and counts. Without a bias the affine-like form keeps the 1 under the root. The formulas, their gradients and
    errors: `affine_divergence.functional.affine_like_conv2d` and `norm_like_conv2d`.

    Two other methods share the name PatchNorm: Killeen's patch-normalised convolution, and Dual PatchNorm, which is layer
    normalisation around the patch embedding of a vision transformer.

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
        form: "affine-like", the formula above, or "norm-like": z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b).
        gain: multiplies the whole map; a positive number, or "auto" for √(d + 1) with d = C_in/groups · K_h · K_w, kept as a
            number in `.gain`. At 1, the paper's formula, outputs are about √d times and steps about d times smaller than those
            of nn.Conv2d on inputs of unit variance. `affine_divergence.init.hidden_gain_` sets it for a whole model.
        eps: of the norm-like form, None being `torch.finfo(torch.float32).eps` whatever the dtype; the affine-like form
            takes none.

    Shape: (N, C_in, H, W) → (N, C_out, H_out, W_out), or both without N.

    Raises:
        ValueError: form is unknown, eps is given with the affine-like form, gain or eps is out of its range, or what
            `nn.Conv2d` refuses.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> layer = PatchNormConv2d(3, 8, 3, padding=1, gain=2.0)
    >>> layer
    PatchNormConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), form=affine-like, gain=2)
    >>> tuple(layer(torch.ones(5, 3, 6, 6)).shape)
    (5, 8, 6, 6)
    """

    _plain = torch.nn.Conv2d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv2d, "norm-like": AF.norm_like_conv2d}


class PatchNormConv3d(_PatchNormConv):
    r"""Convolution over three axes, each patch divided by its norm: `PatchNormConv2d` in three dimensions.

    Constructor, initialisation and state_dict are those of `torch.nn.Conv3d`, then form, gain and eps by name.

    Shape: (N, C_in, D, H, W) → (N, C_out, D_out, H_out, W_out), or both without N.

    >>> tuple(PatchNormConv3d(2, 4, 3)(torch.ones(5, 2, 4, 5, 6)).shape)
    (5, 4, 2, 3, 4)
    """

    _plain = torch.nn.Conv3d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv3d, "norm-like": AF.norm_like_conv3d}
