# Per-layer learning rates with which corrected layers step about as far as plain ones.
from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from affine_divergence.diagnostics._optimizer_kind import StepScale, step_scale
from affine_divergence.init._layers import affine_layer, check_materialised, own_parameters, structural_scale
from affine_divergence.nn import SampleCorrectedConv1d, SampleCorrectedConv2d, SampleCorrectedConv3d, SampleCorrectedLinear

_SAMPLE = (SampleCorrectedLinear, SampleCorrectedConv1d, SampleCorrectedConv2d, SampleCorrectedConv3d)


def param_groups(model: nn.Module, lr: float, *, optimizer: Any = None) -> list[dict[str, Any]]:
    r"""Parameter groups for an optimiser: corrected layers at rates that make their steps as long as a plain layer's at lr.

    A layer with gain g, weights W and rate η trains exactly as one with gain 1, weights g W and rate g² η. A gradient step of a
    plain layer moves an output by (‖x‖² + 1) times its gradient, of an affine-like one by g², of a norm-like one by about 2 g²,
    of a sample-corrected one by 1. Without data ‖x‖² is taken for fan_in, that is: inputs of unit mean square. So the rates are

        affine-like         lr · (fan_in + 1)/gain²
        norm-like           lr · (fan_in + 1)/(2 gain²)        without a bias lr · fan_in/gain²
        sample-corrected    lr · (fan_in + 1)                  without a bias lr · fan_in

    and by the same count where a weight or bias is frozen. Layers whose inputs have another mean square step too far where it is
    below 1, too short where it is above; `affine_divergence.matching_lr` measures it. Activation steps are matched per layer;
    what other rows of the batch contribute (interference) is not.

    Weight decay acts at the rate of its group: divide it by the same factor where it is to shrink weights as in the plain network.

    Under Adam kinds a step does not depend on the gradient's scale: their rates are the roots of these ratios for structural
    layers, as √(fan_in + 1)/gain, and lr for sample-corrected ones.

    Args:
        model: any model. BatchCorrected layers, whose steps depend on the batch and the damping, stay at lr, as do all others.
        lr: the learning rate of the plain layers, positive.
        optimizer: what it is for: an optimiser or its class, SGD, Adam, AdamW, NAdam, RAdam, Adamax or RMSprop. None: SGD.

    Returns:
        Groups {"params": […], "lr": …}, one for each rate, which together hold every parameter of the model once, frozen ones too.
        A parameter that several layers share is at the lowest of their rates.

    Shape:
        fan_in is in_features, or C_in/groups · kernel size, for transposed convolutions over the product of the strides.

    Raises:
        TypeError: model is not an nn.Module, lr not a number, or optimizer no optimiser.
        ValueError: lr is not positive, a parameter is lazy or without values, or the optimiser is of another kind.

    Source: G. Bird, The Affine Divergence, arXiv 2512.22247.

    >>> from affine_divergence.nn import AffineLikeLinear
    >>> model = nn.Sequential(AffineLikeLinear(8, 4), nn.Tanh(), AffineLikeLinear(4, 3, gain="auto"), nn.Linear(3, 2))
    >>> [(group["lr"], len(group["params"])) for group in param_groups(model, lr=0.5)]  # 0.5 · (8 + 1), 0.5 · (4 + 1)/5
    [(4.5, 2), (0.5, 4)]
    """
    check_materialised(model)
    if isinstance(lr, bool) or not isinstance(lr, (int, float)):
        raise TypeError(f"lr must be a number, got {type(lr).__name__}")
    if not 0.0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {lr!r}")
    scale = step_scale(optimizer)
    rates: dict[nn.Parameter, float] = {}
    for module, factor in _factors(model, scale).items():
        for parameter in own_parameters(module):
            rates[parameter] = min(rates.get(parameter, math.inf), lr * factor)
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(rates[parameter], []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


def _factors(model: nn.Module, scale: StepScale) -> dict[nn.Module, float]:
    """The factor of each module; a parametrisation has that of the layer it belongs to."""
    found: dict[nn.Module, float] = {}
    for module in model.modules():
        factor = float(f"{_factor(module, scale):.12g}")  # rates that only rounding tells apart are one group
        for part in (module, *(inner for lists in _parametrizations(module).values() for inner in lists.modules())):
            found.setdefault(part, factor)
    return found


def _factor(module: nn.Module, scale: StepScale) -> float:
    layer = affine_layer("", module)
    structural = structural_scale(module)
    if layer is None or (structural is None and not isinstance(module, _SAMPLE)):
        return 1.0
    weight, bias = (float(_learns(module, name)) for name in ("weight", "bias"))
    plain = weight * layer.fan_in + bias
    if structural is not None:
        of_weight = structural.gain**2 / (layer.fan_in + structural.offset)
        corrected = weight * of_weight * layer.fan_in + bias * (of_weight if structural.scales_bias else structural.gain**2)
    else:
        corrected = 1.0 if scale is StepScale.PROPORTIONAL else plain
    if not plain > 0.0 or not corrected > 0.0:  # nothing learns
        return 1.0
    return plain / corrected if scale is StepScale.PROPORTIONAL else math.sqrt(plain / corrected)


def _learns(module: nn.Module, name: str) -> bool:
    # Not module.weight.requires_grad: reading a spectral norm's weight takes a step of its power iteration.
    if name in _parametrizations(module):
        return any(parameter.requires_grad for parameter in _parametrizations(module)[name].parameters())
    own = [parameter for key, parameter in module._parameters.items() if parameter is not None and key.startswith(name)]  # or weight_orig
    return any(parameter.requires_grad for parameter in own)


def _parametrizations(module: nn.Module) -> dict[str, nn.Module]:
    lists = module._modules.get("parametrizations")
    return dict(lists.named_children()) if lists is not None and is_parametrized(module) else {}
