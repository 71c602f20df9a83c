# The learning rate at which a corrected model steps as far as its uncorrected twin.
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from affine_divergence.diagnostics._arguments import check_model
from affine_divergence.diagnostics._inputs import called_with
from affine_divergence.diagnostics._restoring import untouched
from affine_divergence.diagnostics._self_terms import CORRECTED, CorrectedCall

if TYPE_CHECKING:
    from torch import Tensor


def matching_lr(model: torch.nn.Module, inputs: Tensor | Sequence[Any] | Mapping[str, Any], lr: float) -> float:
    r"""The learning rate whose mean activation step in a corrected model is that of the uncorrected model at lr.

    A gradient step multiplies the ideal update of an activation by G_ii: ‖x_i‖² + 1 in a plain affine layer with a bias,
    gain² in an affine-like one, 2 gain² in a norm-like one, 1 in a sample-corrected one. In a convolution x_i is the patch
    of one image, group and output position. The result is lr · mean G_ii(plain)/mean G_ii(corrected), means over the rows
    (for a convolution the patches) of every layer, then over the layers: for affine-like layers at gain 1,
    lr · mean(‖x_i‖² + 1).
    The plain rows are measured on the same weights with the corrections left out. It is where to start a search for
    the learning rate, not its end: patches of one image overlap, and what they do to each other is not in G_ii. The
    model's state, training flag and random numbers are left as they were.

    Args:
        model: a model with AffineLikeLinear, NormLikeLinear, PatchNormConv, PatchNormConvTranspose, SampleCorrectedLinear or
            SampleCorrectedConv layers; only these count, without what is frozen in them. Give what else it has its own
            parameter group at the old rate. BatchCorrected layers do not count: what a row of theirs moves by hangs on the
            other rows and on the damping; tune their rate.
        inputs: a batch as the model takes it: one tensor, a tuple or list of positional arguments, or a dict of keyword ones.
        lr: the learning rate of the uncorrected model, positive.

    Returns:
        The learning rate, a float.

    Raises:
        TypeError: model is not an nn.Module, or lr not a number.
        ValueError: lr is not positive, no corrected layer is there or was called, or the rows are not finite.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> import torch
    >>> from affine_divergence.nn import AffineLikeLinear
    >>> inputs = torch.tensor([[2.0, 2.0], [1.0, 0.0]])
    >>> round(matching_lr(AffineLikeLinear(2, 5), inputs, lr=0.1), 6)  # 0.1 · ((8 + 1) + (1 + 1))/2
    0.55
    """
    check_model(model)
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr must be a number, got {type(lr).__name__}")
    if not 0.0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite, got {lr!r}")
    layers = [layer for layer in model.modules() if isinstance(layer, CORRECTED)]
    if not layers:
        raise ValueError(
            "the model has no AffineLikeLinear, NormLikeLinear, PatchNormConv or SampleCorrected layer to match; pass the corrected model, "
            "not the plain one"
        )
    corrected, plain = _Means(), _Means()

    def measure(call: CorrectedCall) -> None:
        corrected.add(call.layer, call.corrected())

    def leave_out(call: CorrectedCall) -> Tensor:
        plain.add(call.layer, call.plain())
        return call.uncorrected()

    for at_call in (measure, leave_out):
        with untouched(model), torch.no_grad():
            _run(model, inputs, layers, at_call)
    uncalled = len(layers) - len(corrected)
    if len(corrected) == 0:
        raise ValueError(f"none of the model's {uncalled} corrected layers was called on these inputs, with rows in them")
    wanted, given = plain.mean(), corrected.mean()
    ratio = wanted / given if given else float("nan")
    if not 0.0 < ratio < float("inf"):
        means = f"{wanted:g} (plain) and {given:g} (corrected)"
        raise ValueError(f"no rate matches: the mean multipliers of these inputs are {means}; look for zero, infinite or NaN rows")
    return lr * ratio


class _Means:
    """The mean of each layer's rows over all its calls, and the mean of these over layers."""

    def __init__(self) -> None:
        self._sums: dict[int, float] = {}
        self._rows: dict[int, int] = {}

    def add(self, layer: torch.nn.Module, values: Tensor) -> None:
        if values.numel():
            self._sums[id(layer)] = self._sums.get(id(layer), 0.0) + float(values.sum(dtype=torch.float64))
            self._rows[id(layer)] = self._rows.get(id(layer), 0) + values.numel()

    def __len__(self) -> int:
        return len(self._rows)

    def mean(self) -> float:
        return sum(self._sums[key] / rows for key, rows in self._rows.items()) / len(self._rows)


def _run(model: torch.nn.Module, inputs: Any, layers: Sequence[torch.nn.Module], at_call: Callable[[CorrectedCall], Tensor | None]) -> None:
    def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        x, *options = inspect.signature(layer.forward).bind(*args, **kwargs).args
        return at_call(CorrectedCall(layer, x, options, output))

    # Before the model's own hooks: they then work on the plain output as they do on the corrected one.
    handles = [layer.register_forward_hook(hook, with_kwargs=True, prepend=True) for layer in layers]
    try:
        called_with(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
