# Why a call is not captured, or is not all that its layer's gradients are made of.
from __future__ import annotations

WITHOUT_GRADIENTS = "called without gradients only, as in torch.no_grad() or torch.inference_mode()"
IN_A_TRANSFORM = "called inside a transform of torch.func (grad, vmap, …), in which no gradient is captured"
ADDS_NOTHING = (
    "called, and a gradient arrived by a pass that does not add to .grad, as torch.autograd.grad, which is not captured: "
    "use loss.backward()"
)
CLEARED = (
    "called, and its gradient was gone when the optimiser stepped: cleared, as by zero_grad(), set to zero by hand or by a hook, or "
    "something else had stepped"
)
PARTLY = "a gradient of its parameters was cleared or set to zero, by hand or by a hook, and its rows are told as if it were there"
PENALISED = "a part of its gradient may come by a pass with create_graph=True, as of a gradient penalty, which is not captured"
DIFFERENTIABLE = "called, and a gradient arrived by a pass with create_graph=True, which is not captured: use a loss.backward() without it"
