# Scales of weights measured on one batch, for models of any architecture.
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from affine_divergence.diagnostics._inputs import called_with
from affine_divergence.diagnostics._restoring import untouched
from affine_divergence.gradient._solve import solve_dtype
from affine_divergence.init._calibration import Calibrated, Calibration
from affine_divergence.init._layers import (
    AffineLayer,
    affine_layers,
    check_materialised,
    check_signal,
    output_variance,
    own_parameters,
    owners,
)
from affine_divergence.init._moments import variance_for

if TYPE_CHECKING:
    from torch import Tensor

PASSES = 20  # at most; a model whose layers are called once each needs one
TOLERANCE = 0.01  # of the mean square of a layer that is called several times


def calibrate_(
    model: nn.Module, inputs: Tensor | Sequence[Any] | Mapping[str, Any], *, signal: float = 1.0, nonlinearity: str = "tanh"
) -> Calibration:
    r"""Scale every layer's weight and bias so that on one batch its outputs have the mean square of a start by `signal_`.

    Layer by layer in the order of calls, the mean square of the outputs z becomes the q that solves n · E φ(√q ζ)² = signal, ζ ~ N(0, 1):
    rows of n activations, those of the next layer, then have the mean squared norm `signal`. The last layer called has no activation:
    its output's rows get that norm. All layers are homogeneous in weight and bias, so one factor √(q/mean z²) is exact.
    Relative sizes of weights and biases stay as they were, unlike with `signal_`.

    n is the row length of the layer called next if its sizes fit this layer's outputs, else this layer's own fan-out. Branches of a
    residual stream each get the same scale. With nonlinearity "linear" it is the squared norm of the outputs themselves that is
    `signal`; take that for attention, and for layers before other activations.

    A layer that is called several times, or shares its weight with other layers, has one factor for the mean over its calls, found
    in up to 20 passes. Layers that are frozen, parametrised (spectral norm), or share a parameter with a module of another kind (an
    embedding) are left alone: the report says so. The model runs in the mode it is in; its training flag, buffers and
    random numbers are left as they were, and after an error its weights too.

    Args:
        model: any model with linear or convolutional layers, plain or corrected.
        inputs: a batch as the model takes it: one tensor, a tuple or list of positional arguments, or a dict of keyword ones.
        signal: the mean squared norm of a row.
        nonlinearity: the activation after each layer: "linear", "tanh", "relu" or "leaky_relu" (slope 0.01).

    Returns:
        A `Calibration`: one row for each layer, printed as a table.

    Shape:
        any; mean squares are over all numbers of all calls of a layer.

    Raises:
        TypeError: model is not an nn.Module, or signal not a number.
        ValueError: signal is not positive or out of a Tanh's reach; the nonlinearity is unknown; outputs are zero, NaN or infinite;
            a layer was not called, or on no rows; there is no layer to scale; parameters are lazy or without values.

    Source: Mishkin and Matas, All you need is a good init, arXiv 1511.06422, with the mean squares of `signal_`.

    >>> from affine_divergence.nn import AffineLikeLinear
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(AffineLikeLinear(50, 40), nn.Tanh(), AffineLikeLinear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    >>> x = torch.randn(500, 50)
    >>> print(calibrate_(model, x))
    module  type                before      after   target  factor
    0       AffineLikeLinear  0.006715  → 0.02629  0.02629    1.98
    2       AffineLikeLinear  0.007952  → 0.02629  0.02629    1.80
    4       Linear            0.003350   → 0.5000   0.5000    8.51
    >>> print(f"{model[:4](x).square().sum(1).mean():.2f}")
    1.00
    """
    check_materialised(model)
    signal = check_signal("signal", signal)
    variance_for(0.5, nonlinearity)  # raises for an unknown one
    left = _left_alone(model)
    layers = [layer for layer in affine_layers(model) if layer.name not in left]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear or convolutional layer to calibrate{_because(left)}")
    families: dict[int, _Family] = {}
    for layer in layers:
        families.setdefault(id(layer.module.weight), _Family()).layers.append(layer)
    measured = _Measurement(model, inputs, {id(layer.module): families[id(layer.module.weight)] for layer in layers}, layers)
    rows = measured.calibrated(signal, nonlinearity)
    with torch.no_grad():
        for family in families.values():
            for parameter in dict.fromkeys(p for layer in family.layers for p in own_parameters(layer.module)):
                parameter.mul_(family.factor)
    unknown = math.nan
    reported = [Calibrated(name, type(module).__name__, unknown, unknown, unknown, unknown, note) for name, (module, note) in left.items()]
    return Calibration((*rows, *reported))


class _Family:
    """Layers that share a weight, and so a factor, with the sums of one pass over their calls."""

    def __init__(self) -> None:
        self.layers: list[AffineLayer] = []
        self.factor = 1.0
        self.start_pass()

    def start_pass(self) -> None:
        self.calls = self.squares = self.wanted = 0.0


class _Measurement:
    """Passes of a batch in which the factors are applied to outputs, not to parameters."""

    def __init__(self, model: nn.Module, inputs: Any, families: dict[int, _Family], layers: Sequence[AffineLayer]) -> None:
        self.model, self.inputs, self.families, self.layers = model, inputs, families, layers
        self.targets: dict[int, float] = {}
        self.sums: dict[int, list[float]] = {}  # by layer, in the order of calls: the sum of squares of a pass, and how many numbers
        self.once: set[int] = set()

    def calibrated(self, signal: float, nonlinearity: str) -> list[Calibrated]:
        """The rows, with the factors of the families."""
        distinct = list({id(family): family for family in self.families.values()}.values())
        with untouched(self.model) as beginning, torch.no_grad():
            self._pass()
            before, order = self._mean_squares(), [self._layer(key) for key in self.sums]
            self._check_called()
            for layer, following in zip(order, [*order[1:], None], strict=True):
                width = layer.width_of_next(following) or layer.fan_out
                activation = nonlinearity if following is not None else "linear"
                self.targets[id(layer.module)] = output_variance(layer, signal, width, activation)
            self.once = {id(family) for family in distinct if family.calls == 1}
            settled = False
            for number in range(PASSES):
                beginning.again()
                if number:
                    for family in distinct:
                        if id(family) not in self.once:
                            family.factor *= math.sqrt(family.wanted / family.squares)
                self._pass()
                settled = all(abs(family.squares / family.wanted - 1.0) < TOLERANCE for family in distinct)
                if settled:
                    break
            after = self._mean_squares()
        return [
            Calibrated(
                layer.name,
                type(layer.module).__name__,
                before[id(layer.module)],
                after[id(layer.module)],
                self.targets[id(layer.module)],
                self.families[id(layer.module)].factor,
                self._note(layer, settled),
            )
            for layer in order
        ]

    def _pass(self) -> None:
        self.sums = {}
        for family in self.families.values():
            family.start_pass()
        handles = [layer.module.register_forward_hook(self._hook(layer), prepend=True) for layer in self.layers]
        try:
            called_with(self.model, self.inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: AffineLayer) -> Any:
        def scaled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            family, target = self.families[id(module)], self.targets.get(id(module))
            squares, numbers = float(output.to(solve_dtype(output.device)).square().sum()), output.numel()
            if not math.isfinite(squares):
                raise ValueError(f"outputs of {layer} are NaN or infinite on this batch; look at its inputs and at the layers before it")
            if target is not None and id(family) in self.once and squares:
                family.factor = math.sqrt(target * numbers / squares)
            squares *= family.factor**2
            family.calls += 1
            family.squares += squares
            family.wanted += (target or 0.0) * numbers
            sums = self.sums.setdefault(id(module), [0.0, 0.0])
            sums[0] += squares
            sums[1] += numbers
            return output * family.factor if family.factor != 1.0 else output

        return scaled

    def _mean_squares(self) -> dict[int, float]:
        for key, (squares, numbers) in self.sums.items():
            if not numbers:
                raise ValueError(f"{self._layer(key)} was called on no rows; give a batch that is not empty")
            if not squares:
                raise ValueError(
                    f"all outputs of {self._layer(key)} are zero on this batch, so no factor can scale them; draw its weights anew "
                    "(reset_parameters, or signal_), give other inputs, or freeze it by requires_grad_(False) to leave it alone"
                )
        return {key: squares / numbers for key, (squares, numbers) in self.sums.items()}

    def _check_called(self) -> None:
        missing = [str(layer) for layer in self.layers if id(layer.module) not in self.sums]
        if missing:
            raise ValueError(
                f"not called on this batch: {', '.join(missing)}; give inputs that reach them, or freeze them by requires_grad_(False) "
                "to leave them alone"
            )

    def _layer(self, key: int) -> AffineLayer:
        return next(layer for layer in self.layers if id(layer.module) == key)

    def _note(self, layer: AffineLayer, settled: bool) -> str:
        family = self.families[id(layer.module)]
        notes = [f"{family.calls:g} calls"] if family.calls > 1 else []
        if not settled and abs(family.squares / family.wanted - 1.0) >= TOLERANCE:
            notes.append(f"not settled after {PASSES} passes")
        return ", ".join(notes)


def _left_alone(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """By name the layers that no factor may change, and why."""
    layers = affine_layers(model)
    own, held = {id(layer.module) for layer in layers}, owners(model)
    found = {}
    for layer in layers:
        weight, bias = (layer.module._parameters.get(name) for name in ("weight", "bias"))
        parameters = [p for p in (weight, bias) if p is not None]
        others = [name for p in parameters for name, module in held[id(p)] if id(module) not in own]
        families = {id(module._parameters.get("weight")) for _, module in held.get(id(bias), [])}
        if weight is None or hasattr(layer.module, "parametrizations"):
            found[layer.name] = layer.module, "left alone: parametrised or pruned"
        elif not all(p.requires_grad for p in parameters):
            found[layer.name] = layer.module, "left alone: frozen"
        elif others:
            found[layer.name] = layer.module, f"left alone: shares a parameter with {' and '.join(others)}"
        elif len(families) > 1:
            found[layer.name] = layer.module, "left alone: shares its bias, but not its weight, with another layer"
    return found


def _because(left: dict[str, tuple[nn.Module, str]]) -> str:
    return "".join(f"; {name or 'it'} is {note}" for name, (_, note) in left.items())
