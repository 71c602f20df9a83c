# The learning rate at which a corrected model steps as far as an uncorrected one.
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._arguments import check_model
from affine_divergence.diagnostics._inputs import called_with
from affine_divergence.diagnostics._optimizer_kind import StepScale, step_scale
from affine_divergence.diagnostics._restoring import untouched
from affine_divergence.diagnostics._self_terms import CORRECTED, LayerCall, is_measured

if TYPE_CHECKING:
    from torch import Tensor


def matching_lr(
    model: torch.nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    lr: float,
    *,
    optimizer: Any = None,
    reference: torch.nn.Module | None = None,
) -> float:
    r"""The learning rate whose mean activation step in a corrected model is that of the uncorrected model at lr.

    **SGD**, with or without momentum. A gradient step multiplies the ideal update of an activation by G_ii: ‖x_i‖² + 1 in a plain
    affine layer with a bias, gain² in an affine-like one, 2 gain² in a norm-like one, 1 in a sample-corrected one. In a convolution
    x_i is the patch of one image, group and output position. The result is lr · mean G_ii(plain)/mean G_ii(corrected), means over
    the rows (for a convolution the patches) of every layer, then over the layers: for affine-like layers at gain 1,
    lr · mean(‖x_i‖² + 1).

    **Adam kinds** (Adam, AdamW, NAdam, RAdam, Adamax, RMSprop). Their step δW does not depend on the scale of the gradient, so an
    activation moves as far as its row is long: δz_i = δW r_i, with r_i = [x_i; 1] in a plain layer, gain · [x_i; 1]/√(‖x_i‖² + 1) in
    an affine-like one. The result is lr · mean R(plain)/mean R(corrected) over layers, R = √(mean ‖r_i‖²): for affine-like layers
    lr · √(mean(‖x_i‖² + 1))/gain, for sample-corrected ones lr itself. RAdam's first five steps are those of SGD.

    Adam divides each gradient by its own size, so of a sample correction it keeps only the relative weights of the rows. For the
    correction as derived, train sample-corrected layers with SGD.

    **The reference.** The plain rows are measured on the same weights with the corrections left out. Where the corrections took
    the place of normalisers the signal of that twin may vanish, and its rate means nothing: give the network you trained, with its
    normalisers, as reference. Its layers of the same names as the corrected ones count; if some are missing there, all of its
    linear and convolutional layers.

    The result is where to start a search for the learning rate, not its end: patches of one image overlap, and what they do to each
    other is not in G_ii; nor is the size of the gradients. The mean over layers is dominated by the widest, unless gains (see
    `affine_divergence.init.hidden_gain_`) or rates (`affine_divergence.param_groups`) are per layer. Weight decay grows with the
    rate: divide it by the same factor. State, training flags and random numbers of both models are left as they were.

    Args:
        model: a model with AffineLikeLinear, NormLikeLinear, PatchNormConv, PatchNormConvTranspose, SampleCorrectedLinear or
            SampleCorrectedConv layers; only these count, without what is frozen in them. Give what else it has its own
            parameter group at the old rate. BatchCorrected layers do not count, as their steps depend on the other rows and on
            the damping; tune their rate.
        inputs: a batch as the model takes it: one tensor, a tuple or list of positional arguments, or a dict of keyword ones.
        lr: the learning rate of the uncorrected model, positive.
        optimizer: what trains both: an optimiser or its class, as `torch.optim.AdamW`; None: SGD.
        reference: the uncorrected model that trains well at lr, called with the same inputs; None: the model without its
            corrections.

    Returns:
        The learning rate, a float.

    Shape:
        inputs of any shape that the model takes.

    Raises:
        TypeError: model or reference is not an nn.Module, lr not a number, or optimizer no optimiser.
        ValueError: lr is not positive, no corrected layer is there or was called, the reference called none of its layers, the rows
            are not finite, or no law is known for the optimiser (LBFGS, Adagrad, Muon and others).

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> from affine_divergence.nn import AffineLikeLinear
    >>> inputs = torch.tensor([[2.0, 2.0], [1.0, 0.0]])
    >>> round(matching_lr(AffineLikeLinear(2, 5), inputs, lr=0.1), 6)  # 0.1 · ((8 + 1) + (1 + 1))/2
    0.55
    >>> round(matching_lr(AffineLikeLinear(2, 5), inputs, lr=0.1, optimizer=torch.optim.Adam), 6)  # 0.1 · √5.5
    0.234521
    """
    check_model(model)
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr must be a number, got {type(lr).__name__}")
    if not 0.0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite, got {lr!r}")
    if reference is not None and not isinstance(reference, torch.nn.Module):
        raise TypeError(f"reference must be a torch.nn.Module, got {type(reference).__name__}")
    scale = step_scale(optimizer)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CORRECTED)}
    if not layers:
        raise ValueError(
            "the model has no AffineLikeLinear, NormLikeLinear, PatchNormConv or SampleCorrected layer to match; pass the corrected model, "
            "not the plain one"
        )
    corrected, plain = _Means(scale), _Means(scale)

    def without_correction(call: LayerCall) -> Tensor:
        plain.add(call.plain())
        return call.uncorrected()

    _run(model, inputs, layers.values(), corrected.add)
    if not len(corrected):
        raise ValueError(f"none of the model's {len(layers)} corrected layers was called on these inputs, with rows in them")
    if reference is None:
        _run(model, inputs, layers.values(), without_correction)
    else:
        compared = _counterparts(reference, layers)
        _run(reference, inputs, compared, plain.add)
        if not len(plain):
            raise ValueError(f"none of the reference's {len(compared)} linear and convolutional layers was called with rows in them")
    wanted, given = plain.mean(), corrected.mean()
    ratio = wanted / given if given else float("nan")
    if not 0.0 < ratio < float("inf"):
        means = f"{wanted:g} (plain) and {given:g} (corrected)"
        raise ValueError(f"no rate matches: the mean multipliers of these inputs are {means}; look for zero, infinite or NaN rows")
    return lr * ratio


class _Means:
    """The mean of each layer's rows over all its calls, as far as a step goes by it, and the mean of these over layers."""

    def __init__(self, scale: StepScale) -> None:
        self._scale = scale
        self._sums: dict[int, float] = {}
        self._rows: dict[int, int] = {}

    def add(self, call: LayerCall) -> None:
        values = call.multiplier() if self._scale is StepScale.PROPORTIONAL else call.row_sqnorm()
        if values.numel():
            key = id(call.layer)
            self._sums[key] = self._sums.get(key, 0.0) + float(values.sum(dtype=torch.float64))
            self._rows[key] = self._rows.get(key, 0) + values.numel()

    def __len__(self) -> int:
        return len(self._rows)

    def mean(self) -> float:
        means = [self._sums[key] / rows for key, rows in self._rows.items()]
        return sum(means if self._scale is StepScale.PROPORTIONAL else map(math.sqrt, means)) / len(means)


def _counterparts(reference: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> list[torch.nn.Module]:
    measured = {name: layer for name, layer in reference.named_modules() if is_measured(layer)}
    if not measured:
        raise ValueError(f"the reference {type(reference).__name__} has no linear or convolutional layer to compare with")
    return [measured[name] for name in layers] if layers.keys() <= measured.keys() else list(measured.values())


def _run(
    model: torch.nn.Module, inputs: Any, layers: Iterable[torch.nn.Module], at_call: Callable[[LayerCall], Tensor | None]
) -> None:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        x, *options = inspect.signature(layer.forward).bind(*args, **kwargs).args
        return at_call(LayerCall(layer, x, options, output))

    with untouched(model), torch.no_grad():
        # Before the model's own hooks: they then work on the plain output as they do on the corrected one.
        handles = [layer.register_forward_hook(hook, with_kwargs=True, prepend=True) for layer in layers]
        try:
            called_with(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
