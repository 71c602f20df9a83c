# PatchNorm transposed convolutions: drop-in for torch.nn.ConvTranspose1d, 2d and 3d, not subclasses of them.
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

import affine_divergence.functional as AF
from affine_divergence.nn._patch_norm import PatchNorm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from affine_divergence.nn._patch_norm import Forms


class _PatchNormConvTranspose(PatchNorm):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        form: str = "affine-like",
        gain: float | str = 1.0,
        eps: float | None = None,
    ) -> None:
        plain = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, padding_mode)
        super().__init__((*plain, device, dtype), form, gain, eps)

    def forward(self, input: Float[Tensor, "*n c_in *size"], output_size: list[int] | None = None) -> Float[Tensor, "*n c_out *size_out"]:
        """(N, C_in, *size) → (N, C_out, *size_out), or both without N; an output_size takes the place of output_padding."""
        dims, sizes = len(self.kernel_size), (self.stride, self.padding, self.kernel_size)
        output_padding = self._plain._output_padding(self, input, output_size, *sizes, dims, self.dilation)  # type: ignore[attr-defined]
        return self._normalised(input, self.stride, self.padding, tuple(output_padding), self.groups, self.dilation)


class PatchNormConvTranspose1d(_PatchNormConvTranspose):
    r"""Transposed convolution over one axis, normalised: `PatchNormConvTranspose2d` in one dimension.

    Constructor, initialisation and state_dict are those of `torch.nn.ConvTranspose1d`, then form, gain and eps by name.

    Shape: (N, C_in, L) → (N, C_out, L_out), or both without N.

    >>> tuple(PatchNormConvTranspose1d(2, 4, 3, stride=2)(torch.ones(5, 2, 8)).shape)
    (5, 4, 17)
    """

    _plain = torch.nn.ConvTranspose1d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv_transpose1d, "norm-like": AF.norm_like_conv_transpose1d}


class PatchNormConvTranspose2d(_PatchNormConvTranspose):
    r"""Transposed convolution divided by the norm of what reaches each position: z_p = gain · (W·patch_p + b)/√(‖patch_p‖² + 1).

    patch_p are the inputs that reach output position p. Constructor, initialisation and state_dict are those of
    `torch.nn.ConvTranspose2d`; form, gain and eps are not in the state_dict. Not a subclass of `nn.ConvTranspose2d`.
    Without a bias the affine-like form keeps the 1 under the root. The formulas, their gradients and errors:
    `affine_divergence.functional.affine_like_conv_transpose2d` and `norm_like_conv_transpose2d`.

    Args:
        in_channels: as in `nn.ConvTranspose2d`, and so all up to dtype.
        out_channels: C_out.
        kernel_size: one number, or two.
        stride: one number, or two.
        padding: one number, or two.
        output_padding: one number, or two.
        groups: of channels.
        bias: whether there is a b.
        dilation: one number, or two.
        padding_mode: "zeros".
        device: of the parameters.
        dtype: of the parameters.
        form: "affine-like", the formula above, or "norm-like": z_p = gain · (W·patch_p/√(‖patch_p‖² + ε) + b).
        gain: multiplies the whole map; a positive number, or "auto" for √(d + 1), kept as a number in `.gain`. Here
            d = C_in/groups · K_h · K_w/(S_h · S_w) is the mean number of inputs that reach one output position, away from the
            borders. At 1 outputs and steps are smaller than those of nn.ConvTranspose2d, as in `PatchNormConv2d`.
        eps: of the norm-like form, None being `torch.finfo(torch.float32).eps` whatever the dtype; the affine-like form
            takes none.

    Shape: (N, C_in, H, W) → (N, C_out, H_out, W_out), or both without N; an output_size is taken as by
        `nn.ConvTranspose2d`.

    Raises:
        ValueError: form is unknown, eps is given with the affine-like form, gain or eps is out of its range, or what
            `nn.ConvTranspose2d` refuses.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> layer = PatchNormConvTranspose2d(3, 8, 2, stride=2)
    >>> layer
    PatchNormConvTranspose2d(3, 8, kernel_size=(2, 2), stride=(2, 2), form=affine-like, gain=1)
    >>> tuple(layer(torch.ones(5, 3, 6, 6)).shape)
    (5, 8, 12, 12)
    >>> tuple(layer(torch.ones(5, 3, 6, 6), output_size=[13, 12]).shape)
    (5, 8, 13, 12)
    """

    _plain = torch.nn.ConvTranspose2d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv_transpose2d, "norm-like": AF.norm_like_conv_transpose2d}


class PatchNormConvTranspose3d(_PatchNormConvTranspose):
    r"""Transposed convolution over three axes, normalised: `PatchNormConvTranspose2d` in three dimensions.

    Constructor, initialisation and state_dict are those of `torch.nn.ConvTranspose3d`, then form, gain and eps by name.

    Shape: (N, C_in, D, H, W) → (N, C_out, D_out, H_out, W_out), or both without N.

    >>> tuple(PatchNormConvTranspose3d(2, 4, 2, stride=2)(torch.ones(5, 2, 2, 3, 4)).shape)
    (5, 4, 4, 6, 8)
    """

    _plain = torch.nn.ConvTranspose3d
    _forms: ClassVar[Forms] = {"affine-like": AF.affine_like_conv_transpose3d, "norm-like": AF.norm_like_conv_transpose3d}
