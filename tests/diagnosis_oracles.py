# The measures of a step written out in float64: every call's rows and their Gram matrix, bare layers before and after a real step.
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import conv_oracles
import numpy as np
import torch
from oracles import FLOAT32_EPS
from torch import Tensor, nn

import affine_divergence.nn as corrected
from affine_divergence.nn._patch_norm import PatchNorm

Loss = Callable[[nn.Module], Tensor]
Row = dict[str, float]
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, PatchNorm)
LINEAR = (nn.Linear, corrected.AffineLikeLinear, corrected.NormLikeLinear)


@dataclass
class Call:
    """One call of a layer: what it was given, ∂L/∂z as rows (n, o), what each row is made of, (n, d), with its group, and its ‖x‖²."""

    layer: nn.Module
    arguments: tuple[Any, ...]
    g: Tensor
    x: Tensor
    group: Tensor
    sqnorm: Tensor

    def moved(self, before: nn.Module, after: nn.Module) -> Tensor:
        """z of the bare layer after, minus z of the bare layer before, as rows."""
        with torch.no_grad():
            return rows_of_output(after, after(*self.arguments)) - rows_of_output(before, before(*self.arguments))


def diagnosis(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, between: Callable[[nn.Module], None] = lambda _: None
) -> tuple[dict[tuple[str, int], Row], Row]:
    """A real step of optimizer on loss(model): the row of every layer and call, and the change of the loss.

    `between` is what happens between the backward and the step, such as clipping. The model is left after the step.
    """
    before = copy.deepcopy(model)
    gradients = uncorrected_gradients(before, loss)
    calls, value = captured(model, loss)
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    slope = {name: g.clone() for name, g in own.items()}
    between(model)
    optimizer.step()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    if any(group["maximize"] for group in optimizer.param_groups if "maximize" in group):  # what climbs descends −L
        gradients = {name: -gradient for name, gradient in gradients.items()}
        for of_layer in calls.values():
            for call in of_layer:
                call.g = -call.g
    rate = {name: float(rates.get(id(p), math.nan)) for name, p in model.named_parameters(remove_duplicate=False)}
    plain, unit = copy.deepcopy(before), copy.deepcopy(before)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if name in gradients:
                p -= rate[name] * gradients[name]
        for name, p in unit.named_parameters():
            if name in gradients:
                p -= gradients[name]
    rows: dict[tuple[str, int], Row] = {}
    for name, of_layer in calls.items():
        first, now, flat, one = (m.get_submodule(name) for m in (before, model, plain, unit))
        weight = learning_name(name, first)
        terms = [self_terms(call) for call in of_layer]
        alone = [others_by_gram(of_layer, i) for i in range(len(of_layer))]
        tied = sum(p is first._parameters["weight"] for m in before.modules() for p in m._parameters.values()) > 1
        for i, call in enumerate(of_layer):
            others = -call.moved(first, one) - terms[i].unsqueeze(1) * call.g if tied else alone[i]
            row = measured(call.moved(first, now), call.g, rate[weight])
            row |= {f"{key}_plain": v for key, v in measured(call.moved(first, flat), call.g, rate[weight]).items()}
            row |= of_gram(terms[i], multipliers_alone(first, terms[i]), others, call.g)
            old = first.get_parameter(weight.rpartition(".")[2])
            for key, after in (("update_ratio", now), ("update_ratio_plain", flat)):
                moved = after.get_parameter(weight.rpartition(".")[2]) - old
                row[key] = (moved.norm() / old.norm()).item()
            row["rank"], row["rank_limit"] = rank(call)
            rows[name, i] = row
    with torch.no_grad():
        after_value = loss(model).item()
        change = {name: model.get_parameter(name) - p for name, p in before.named_parameters()}
    predicted = sum(float((g * change[name]).sum()) for name, g in slope.items())
    return rows, {"before": value, "after": after_value, "predicted": predicted, "realised": after_value - value}


def learning_name(name: str, layer: nn.Module) -> str:
    """The name of the layer's weight, or of its bias where the weight is frozen."""
    leaf = "weight" if layer.get_parameter("weight").requires_grad else "bias"
    return f"{name}.{leaf}" if name else leaf


def captured(model: nn.Module, loss: Loss) -> tuple[dict[str, list[Call]], float]:
    """The calls of every layer, in order: a zero is added to each output, and its gradient is ∂L/∂z. Leaves the gradients in .grad."""
    seen: dict[str, list[tuple[tuple[Any, ...], Tensor]]] = {}
    handles = []
    for name, layer in layers(model):

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor, name: str = name) -> Tensor:
            zero = torch.zeros_like(z, requires_grad=True)
            seen.setdefault(name, []).append(((*args, *kwargs.values()), zero))
            return z + zero

        handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    model.zero_grad(set_to_none=True)
    value = loss(model)
    value.backward()
    for handle in handles:
        handle.remove()
    calls = {}
    for name, of_layer in seen.items():
        layer = model.get_submodule(name)
        calls[name] = [_call(layer, arguments, zero) for arguments, zero in of_layer if zero.grad is not None]
    return {name: of_layer for name, of_layer in calls.items() if of_layer}, value.item()


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers whose rows can be written out and that have something to learn."""
    for name, module in model.named_modules():
        known = isinstance(module, (*LINEAR, *CONVS, nn.Embedding)) or is_transposed_linear(module)
        if known and any(p.requires_grad for p in module.parameters(recurse=False)):
            yield name, module


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is the layer of GPT-2 that is named Conv1D and keeps a linear layer's weight transposed."""
    return type(module).__name__ == "Conv1D"


def _call(layer: nn.Module, arguments: tuple[Any, ...], zero: Tensor) -> Call:
    arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    g = rows_of_output(layer, zero.grad)
    x, group, sqnorm = rows_of_input(layer, arguments[0], zero.shape)
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        g = g * (arguments[0].flatten() != layer.padding_idx).unsqueeze(1)
    return Call(layer, arguments, g, x, group, sqnorm)


def rows_of_output(layer: nn.Module, z: Tensor | None) -> Tensor:
    """(N, C_out, *out) → a row of C_out/groups for each image, group and position; (…, o) → (n, o)."""
    assert z is not None
    if not isinstance(layer, CONVS):
        return z.reshape(-1, z.shape[-1])
    z = _batched(layer, z).flatten(2)  # (N, C_out, positions)
    return z.unflatten(1, (layer.groups, -1)).transpose(2, 3).flatten(0, 2)


def rows_of_input(layer: nn.Module, x: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """What each row of the output is made of, its [x 1] without what does not learn, as the layer scales it; the row's group; ‖x‖²."""
    if isinstance(layer, nn.Embedding):
        one_hot = torch.eye(layer.num_embeddings, dtype=torch.float64)
        if layer.padding_idx is not None:
            one_hot[layer.padding_idx] = 0.0  # cannot be moved
        x, group = one_hot[x.flatten()], torch.zeros(x.numel())
    elif isinstance(layer, CONVS):
        patches = conv_oracles.vectors(_patches(layer, _batched(layer, x), shape), layer.groups)  # (N, groups, positions, d)
        group = torch.arange(layer.groups).reshape(1, -1, 1).expand(patches.shape[:3]).flatten()
        x = patches.flatten(0, 2)
    else:
        x, group = x.reshape(-1, x.shape[-1]), torch.zeros(x.numel() // x.shape[-1])
    ones = torch.ones(len(x), 1, dtype=torch.float64)
    x = x.double()
    sqnorm = x.square().sum(1, keepdim=True)
    if isinstance(layer, (corrected.AffineLikeLinear, corrected.NormLikeLinear, PatchNorm)):
        norm_like = isinstance(layer, corrected.NormLikeLinear) or getattr(layer, "form", "") == "norm-like"
        eps = (FLOAT32_EPS if layer.eps is None else layer.eps) if norm_like else 1.0
        s = (sqnorm + eps).rsqrt()
        x, ones = layer.gain * s * x, layer.gain * (ones if norm_like else s)
    learns = {name: p.requires_grad for name, p in layer.named_parameters(recurse=False)}
    return torch.cat([x] * learns["weight"] + [ones] * learns.get("bias", False), 1), group, sqnorm


def _patches(layer: Any, x: Tensor, shape: torch.Size) -> Tensor:
    if "Transpose" not in type(layer).__name__:
        return conv_oracles.conv_patches(x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode)
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    out = shape[-len(layer.kernel_size) :]
    least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in zip(x.shape[2:], *options, strict=True)]
    left = [o - n for o, n in zip(out, least, strict=True)]  # output_padding, or what an output_size asks for
    return conv_oracles.conv_transpose_patches(x, *options[:3], left, options[3])


def _batched(layer: Any, x: Tensor) -> Tensor:
    return x if x.ndim == len(layer.kernel_size) + 2 else x.unsqueeze(0)


def self_terms(call: Call) -> Tensor:
    """G_ii."""
    return torch.stack([row @ row for row in call.x])


def others_by_gram(calls: list[Call], i: int) -> Tensor:
    """Σ_{j≠i} G_ij g_j of the rows of the i-th call, j over all rows of all calls, in one group."""
    x, g, group = (torch.cat([getattr(call, part) for call in calls]) for part in ("x", "g", "group"))
    gram = (x @ x.mT) * (group.unsqueeze(0) == group.unsqueeze(1))
    gram.fill_diagonal_(0.0)
    return (gram @ g).split([len(call.x) for call in calls])[i]


def measured(change: Tensor, g: Tensor, rate: float) -> Row:
    """The measures of what rows were changed by; rows of g that are 0 are left out."""
    kept = g.count_nonzero(1) > 0
    dz, g = change[kept], g[kept]
    slopes, lengths, steep = ((a * b).sum(1).numpy() for a, b in ((dz, g), (dz, dz), (g, g)))
    m = -slopes / (rate * steep)
    still = lengths == 0
    cosines = np.where(still, 0.0, -slopes / np.sqrt(np.where(still, 1.0, lengths) * steep))
    row = {f"multiplier_{key}": float(np.percentile(m, q, method="linear")) for key, q in (("p5", 5), ("median", 50), ("p95", 95))}
    row |= {"multiplier_mean": float(m.mean()), "multiplier_cv": float(m.std() / abs(m.mean())) if m.mean() else math.nan}
    row["alignment_median"] = float(np.median(cosines))
    row["below_zero"] = float((slopes > 0).mean())
    row["efficiency"] = float(slopes.sum() / np.sqrt(lengths.sum() * steep.sum())) if lengths.any() else math.nan
    return row


def multipliers_alone(layer: nn.Module, terms: Tensor) -> Tensor:
    """What plain descent would multiply each row by if there were no other: G_ii, which a sample correction makes 1."""
    name = type(layer).__name__
    if name.startswith("BatchCorrected"):
        return torch.full_like(terms, torch.nan)
    return (terms > 0).to(terms.dtype) if name.startswith("SampleCorrected") else terms


def of_gram(terms: Tensor, alone_terms: Tensor, others: Tensor, g: Tensor) -> Row:
    """Interference, the percentiles of the multipliers of rows alone, and the count of rows."""
    kept = g.count_nonzero(1) > 0
    alone = alone_terms[kept].numpy()
    row = {f"self_term_{key}": float(np.percentile(alone, q, method="linear")) for key, q in (("p5", 5), ("median", 50), ("p95", 95))}
    row["interference"] = float((g.norm(dim=1) * others.norm(dim=1))[kept].sum() / (terms * g.square().sum(1))[kept].sum())
    return row | {"rows": int(kept.sum()), "masked": int((~kept).sum())}


def rank(call: Call) -> tuple[int, int]:
    """The numerical rank of a call's rows, of the group where it is least, and what it can be at most."""
    groups = [call.x[call.group == group] for group in call.group.unique()]
    return min(int(torch.linalg.matrix_rank(x, rtol=max(x.shape) * FLOAT32_EPS)) for x in groups), min(groups[0].shape)


def uncorrected_gradients(model: nn.Module, loss: Loss) -> dict[str, Tensor]:
    """∂L/∂θ, also where a layer makes something else of it."""
    model = copy.deepcopy(model)
    for module in model.modules():
        name = type(module).__name__
        if type(module).__module__.startswith("affine_divergence") and name.startswith(("Sample", "Batch")):
            module.__class__ = getattr(nn, name.partition("Corrected")[2])
    model.zero_grad(set_to_none=True)
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
