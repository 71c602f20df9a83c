# Carries corrected gradients of weight and bias beside torch's own operation, whose output and input gradient stay bit-identical.
#
#   z = product(x, weight, bias)           torch's operation on detached parameters, under whatever autocast is active
#   ∂L/∂weight, ∂L/∂bias = gradients(∂L/∂z, x, weight, needed)
#
# `gradients` is called in the backward, without autocast and without grad mode, with the x and weight of the forward (for `weight` that
# means shape, dtype and layout). `needed` says of weight and bias which of them learn: what does not is None in the result, and leaves
# the Gram matrix. The results are brought to the dtypes of the parameters here. Under vmap each sample has a call of its own; under
# torch.compile the body of `gradients` is traced, so it must be a function or a frozen dataclass whose calls can be.
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from affine_divergence.functional._autocast import without_autocast
from affine_divergence.functional._rows import forward_mode

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[Tensor | None, Tensor | None]
    Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
    Gradients = Callable[[Tensor, Tensor, Tensor, tuple[bool, bool]], Pair]


_FORWARD = (
    "a corrected gradient has no forward mode: the output is torch's own, and so is its forward derivative, which knows nothing of the "
    "correction; freeze weight and bias (requires_grad_(False), torch.no_grad()), or use the torch layer"
)
_TWICE = (
    "a corrected gradient cannot be differentiated again: it is not the derivative of the loss, so that a gradient penalty, a Hessian or "
    "a second derivative through this layer would be wrong; freeze its weight and bias (requires_grad_(False)), or use the torch layer"
)
_COMPILED = (
    "a corrected gradient cannot be compiled within a transform of torch.func, which hides there which parameters learn; leave the "
    "transform uncompiled, or compile under torch.no_grad() what only needs outputs"
)


def carried(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients) -> Tensor:
    """`product(x, weight, bias)`, whose weight and bias get the gradients that `gradients` returns."""
    transformed = torch._C._are_functorch_transforms_active()
    if transformed and torch.compiler.is_compiling() and torch.is_grad_enabled():
        torch._dynamo.graph_break(msg=_COMPILED)  # no parameter says there that it learns: its gradient would silently be torch's
    needed = _learns(weight), bias is not None and _learns(bias)
    learns = torch.is_grad_enabled() and any(needed)
    if forward_mode() and (learns or _is_dual(weight) or (bias is not None and _is_dual(bias))):
        raise RuntimeError(_FORWARD)
    if not learns or torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        # An exported or traced graph is torch's own.
        return product(x, weight, bias)
    # The backward visits later nodes first: made before those of the product, these views hold the parameters' gradients back until it
    # is done. Without them an optimiser that steps in a hook of the gradient changes the weight before ∂L/∂x is made of it.
    # Aliases: the backward of view_as would give a depthwise weight's gradient other strides than torch's.
    late_weight, late_bias = (None if p is None else torch.ops.aten.alias(p) for p in (weight, bias))
    z = product(x, weight.detach(), None if bias is None else bias.detach())
    # Nor in place where a mode looks at every operation: selective checkpointing keeps the output of the product, and refuses changes.
    in_place = not (transformed or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())
    if in_place and z._is_view():  # 3-D input, unbatched image: the backward of a view that is marked as changed copies ∂L/∂z twice
        z = torch.ops.aten._unsafe_view(z, z.shape)
    carrying: Tensor = (_CarryInPlace if in_place else _Carry).apply(z, x, late_weight, late_bias, gradients, needed)
    return carrying


class _Carry(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients, needed: tuple[bool, bool]) -> Tensor:
        return z.clone()  # not z: it would be a view, on which an activation in place is refused

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, weight, bias, ctx.gradients, ctx.needed = inputs
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = upstream
        x, weight, bias = ctx.saved_tensors
        with torch.no_grad(), without_autocast(x.device.type):
            weight_grad, bias_grad = ctx.gradients(g, x, weight, ctx.needed)
            weight_grad = weight_grad.to(weight.dtype) if ctx.needed[0] else None
            bias_grad = bias_grad.to(bias.dtype) if ctx.needed[1] else None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # which refuses second derivatives itself
            # A result of torch.func is free for changes in place, in eager mode a view would not be.
            copy = not torch._C._are_functorch_transforms_active()
            weight_grad, bias_grad = (None if t is None else _Once.apply(t, copy, g, x, weight, bias) for t in (weight_grad, bias_grad))
            g = _Once.apply(g, False, g, x, weight, bias)
        return g, None, weight_grad, bias_grad, None, None


class _CarryInPlace(_Carry):
    # What vmap and torch.compile do not support, and spares a copy of z.

    @staticmethod
    def forward(z: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients, needed: tuple[bool, bool]) -> Tensor:
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Carry.setup_context(ctx, inputs, output)
        ctx.mark_dirty(output)


class _Once(torch.autograd.Function):
    # A gradient as it is, and its derivative for any of the tensors that it is a function of, which raises instead of being zero.

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, copy: bool, *of: Tensor | None) -> Tensor:
        return gradient.clone() if copy else gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(_TWICE)


def _learns(parameter: Tensor) -> bool:
    # Under torch.func a mapped tensor does not say so itself: vmap within grad, with a weight for each sample.
    return any(t.requires_grad for t in _levels(parameter))


def _is_dual(parameter: Tensor) -> bool:
    return any(forward_ad.unpack_dual(t).tangent is not None for t in _levels(parameter) if not torch._C._functorch.is_batchedtensor(t))


def _levels(tensor: Tensor) -> list[Tensor]:
    """The tensor and, under the transforms of torch.func, those it wraps."""
    levels = [tensor]
    if not torch.compiler.is_compiling():
        while torch._C._functorch.is_functorch_wrapped_tensor(levels[-1]):
            levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels
