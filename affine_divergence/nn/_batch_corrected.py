# Batch-corrected layers: torch's own linear and convolutional layers, whose weight gradient moves all activations at once as they should.
from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import torch

from affine_divergence.functional._geometry import Geometry
from affine_divergence.functional._rows import linear
from affine_divergence.gradient._average import Averaged, RunningMoment
from affine_divergence.gradient._batch import Batch, Corrected
from affine_divergence.gradient._batch_arguments import check_average, check_damping
from affine_divergence.gradient._carry import carried
from affine_divergence.gradient._convolution import convolution
from affine_divergence.gradient._group import Group
from affine_divergence.gradient._layer_gradients import LayerGradients, number_of
from affine_divergence.gradient._patch_rows import LINEAR
from affine_divergence.nn._padding import padded

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from torch.distributed import ProcessGroup


class _BatchCorrected(torch.nn.Module):
    damping: float
    decay: float
    every: int
    realised_share: Tensor | None
    _average: RunningMoment | None
    _group: Group | None
    _number: Tensor

    def _correct_by(self, damping: float, decay: float, every: int, process_group: ProcessGroup | None) -> None:
        self.damping = check_damping(damping)
        self.decay, self.every = check_average(decay, every)
        self.process_group = process_group
        self.realised_share = None
        self._average = None
        self._number = number_of(self)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes whose rows are one batch."""
        return None if self._group is None else self._group.process_group

    @process_group.setter
    def process_group(self, process_group: ProcessGroup | None) -> None:
        self._group = None if process_group is None else Group(process_group)

    def reset_average(self) -> None:
        """Forget the running average: the next backward starts a new one."""
        self._average = None

    def corrected(self, g: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool], geometry: Geometry) -> Corrected:
        """The corrected gradients of one call, by the options of now; keeps the share and the average."""
        transformed = torch._C._are_functorch_transforms_active()  # what they pass here does not outlive them
        damping, (decay, every) = check_damping(self.damping), check_average(self.decay, self.every)
        moments = None
        if decay:
            moments = Averaged(self.bias is not None, decay, every, self.training and not transformed, self._average)
        corrected = Batch(geometry, needed, damping, self._group).corrected(g, x, weight, moments)
        if not transformed:
            self.realised_share = corrected.share
            if moments is not None:
                self._average = moments.kept
        return corrected

    def _carried(self, product: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return carried(product, x, weight, bias, LayerGradients.of(geometry, self._number))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = number_of(self)  # of a pickled one: not that of the original

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Not by __setstate__, which torch's parametrisations go round when they copy.
        memo[id(self)] = replica = self.__new__(type(self))
        replica.__dict__ = copy.deepcopy(self.__dict__, memo)
        replica._number = number_of(replica)
        return replica

    def extra_repr(self) -> str:
        """The options, as torch's layer shows its own."""
        group = "" if self._group is None else f", process_group={self._group}"
        average = f", decay={self.decay:g}, every={self.every}" if self.decay else ""
        return f"{super().extra_repr()}, damping={self.damping:g}{average}{group}"


class _BatchCorrectedConv(_BatchCorrected, torch.nn.modules.conv._ConvNd):
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
        damping: float = 1e-3,
        decay: float = 0.0,
        every: int = 1,
        process_group: ProcessGroup | None = None,
    ) -> None:
        sizes: tuple[Any, ...] = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        super().__init__(*sizes, groups, bias, padding_mode, device, dtype)  # type: ignore[call-arg]  # that of nn.Conv2d or its kin
        self._correct_by(damping, decay, every, process_group)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, padding = padded(self, input)
        product, geometry = convolution(weight.shape[2:], self.stride, padding, self.dilation, self.groups)
        return self._carried(product, x, weight, bias, geometry)


class BatchCorrectedLinear(_BatchCorrected, torch.nn.Linear):
    r"""`nn.Linear`, whose weight and bias get the gradient that moves every z_i by its own −lr · ∂L/∂z_i at once.

    Outputs and ∂L/∂x are bit-identical to those of `nn.Linear`, of which it is a subclass; constructor, initialisation and
    state_dict are torch's. The gradient, its two forms and their cost: `affine_divergence.gradient.batch_corrected_linear`.
    Any optimiser takes it; compared with the plain gradient its scale does not grow with ‖x‖², nor with the number of rows
    that agree: learning rates must be tuned anew.

    **The share.** After a backward `realised_share` is ⟨δz, δz*⟩/‖δz*‖² of the change δz that a gradient step makes by this
    layer's own parameters at unchanged inputs and the wanted one, δz* = −lr · ∂L/∂z: from 0 to 1, for plain gradient descent.
    64 random rows in 8 dimensions and a bias can realise some 9/64. It is of the last call whose backward ran, a 0-dimensional
    tensor without a graph (reading it by `.item()` waits for the device); None before, NaN where ∂L/∂z was 0 or there were no
    rows.

    **The average.** With decay > 0 the layer solves with N·S in place of X̃ᵀX̃, S the average of X̃ᵀX̃/N over backwards,
    weighted by (1 − decay)·decay^age and by one over the sum of these weights, always in the primal form: FOOF. Every backward
    in training mode counts its batch in, before it solves; in eval mode the average is used as it is (where there is none yet,
    the batch's own moment). A batch that holds NaN or inf is left out of it, and has a gradient of NaN. With every > 1 the
    inverse is made at every so many backwards and kept between, S + (λ/N)I as it then was. Copies and pickles keep the average,
    the state_dict does not; it stays in float64 whatever `.to()` and `.half()` do. The share can then be above 1.

    **Several calls** of the layer, and micro-batches, are corrected each by its own rows and their gradients added; the
    average counts each. **torch.compile**: the same, one opaque operation in the backward. **torch.func**: per-sample gradients
    are those of batches of one; share and average are left as they were.

    Args:
        in_features: d_in, the size of the last dimension of x.
        out_features: d_out.
        bias: whether there is a b.
        device: of the parameters.
        dtype: of the parameters.
        damping: λ relative to the mean squared length of the rows [x; 1]; 0.0 is the least-norm solution.
        decay: of the running average, from 0 (none) to below 1.
        every: at how many backwards the average is inverted anew; needs a decay.
        process_group: the processes whose rows are one batch, as under DistributedDataParallel, which averages what each of
            them contributes; Gram matrix, average and share are then of all rows. Each backward waits for all processes and
            for the number of their rows. Copies share the group; a layer with one cannot be pickled.

    Shape: x (…, d_in) → z (…, d_out); rows are all but the last axis.

    Raises:
        TypeError: damping or decay is not a number, every not a whole one, or process_group is none.
        ValueError: damping is negative, decay not in [0, 1), every below 1, or above 1 without a decay.
        RuntimeError: in forward mode, or where a gradient of it is differentiated again.

    Source: as of `affine_divergence.gradient.batch_corrected_linear`.

    >>> _ = torch.manual_seed(0)
    >>> layer = BatchCorrectedLinear(8, 4, damping=0.01)
    >>> layer
    BatchCorrectedLinear(in_features=8, out_features=4, bias=True, damping=0.01)
    >>> x, wanted = torch.randn(64, 8), torch.randn(64, 4)
    >>> layer(x).backward(wanted)
    >>> f"{layer.realised_share:.2f}"
    '0.16'
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        damping: float = 1e-3,
        decay: float = 0.0,
        every: int = 1,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._correct_by(damping, decay, every, process_group)

    def forward(self, input: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """(…, d_in) → (…, d_out)."""
        return self._carried(linear, input, self.weight, self.bias, LINEAR)


class BatchCorrectedConv1d(_BatchCorrectedConv, torch.nn.Conv1d):
    r"""`nn.Conv1d` with the gradient of `BatchCorrectedConv2d`, in one dimension.

    Constructor, initialisation and state_dict are those of `nn.Conv1d`, then damping, decay, every and process_group by name.

    Shape: (N, C_in, L) → (N, C_out, L_out), or both without N.

    >>> BatchCorrectedConv1d(2, 4, 3, padding="same", decay=0.95, every=10)
    BatchCorrectedConv1d(2, 4, kernel_size=(3,), stride=(1,), padding=same, damping=0.001, decay=0.95, every=10)
    """


class BatchCorrectedConv2d(_BatchCorrectedConv, torch.nn.Conv2d):
    r"""`nn.Conv2d`, whose weight and bias get the gradient that moves every position by its own −lr · ∂L/∂z_p at once.

    Outputs and ∂L/∂x are bit-identical to those of `nn.Conv2d`, of which it is a subclass; constructor, initialisation and
    state_dict are torch's. What is a row in `BatchCorrectedLinear` is here the patch that a position reads, padding of every
    mode included, and each group of channels has its own: the share, the average, several calls and processes, compilation
    and errors are as there. The gradient and its cost: `affine_divergence.gradient.batch_corrected_conv2d`.

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
        damping: as in `BatchCorrectedLinear`, and so the rest.
        decay: of the running average.
        every: at how many backwards it is inverted anew.
        process_group: the processes whose images are one batch.

    Shape: (N, C_in, H, W) → (N, C_out, H_out, W_out), or both without N.

    >>> layer = BatchCorrectedConv2d(3, 8, 3, padding=1)
    >>> layer
    BatchCorrectedConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), damping=0.001)
    >>> layer(torch.ones(5, 3, 6, 6)).sum().backward()
    >>> tuple(layer.weight.grad.shape)
    (8, 3, 3, 3)
    """


class BatchCorrectedConv3d(_BatchCorrectedConv, torch.nn.Conv3d):
    r"""`nn.Conv3d` with the gradient of `BatchCorrectedConv2d`, in three dimensions.

    Constructor, initialisation and state_dict are those of `nn.Conv3d`, then damping, decay, every and process_group by name.

    Shape: (N, C_in, D, H, W) → (N, C_out, D_out, H_out, W_out), or both without N.

    >>> tuple(BatchCorrectedConv3d(2, 4, 3)(torch.ones(5, 2, 4, 5, 6)).shape)
    (5, 4, 2, 3, 4)
    """
