# What others do with a layer's gradients, as passes to be timed: K-FAC of asdl, gradients of every sample by opacus and by torch.func.
#
# Layout: a layer nn.Linear, its input x (N, d), ∂L/∂z upstream (N, o). After a pass the gradients to step along are in .grad, ∂L/∂x too.
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from affine_divergence.lab.benchmarks._passes import one_pass

if TYPE_CHECKING:
    from torch import Tensor

PACKAGES = {"asdl": "asdfghjkl", "opacus": "opacus"}  # by module, as pip calls them
FIRST, LATER = 0, 1  # steps of K-FAC: one that makes its inverses, one that keeps them


def missing(module: str) -> str | None:
    """What to say of a package that is not there."""
    return None if find_spec(module) else f"not installed: pip install {PACKAGES[module]}"


def opacus_samples(layer: nn.Linear, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """The sample correction from the gradient of every sample, by opacus beside torch's own."""
    from opacus import GradSampleModule

    sampled = GradSampleModule(layer, loss_reduction="sum")
    plain = one_pass(sampled, x, upstream)

    def run() -> None:
        plain()
        _sum_corrected(layer, x, [cast(Any, parameter).grad_sample for parameter in layer.parameters()])
        sampled.set_grad_sample_to_none()  # 1 GB at 256 rows of 1024 → 1024, while others are timed

    return run


def vmap_samples(layer: nn.Linear, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    """The same by torch.func.vmap(torch.func.grad(…))."""

    def loss(parameters: dict[str, Tensor], row: Tensor, row_upstream: Tensor) -> Tensor:
        z: Tensor = torch.func.functional_call(layer, parameters, (row,))
        return z @ row_upstream

    gradients = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0, 0))
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def run() -> None:
        samples, x.grad = gradients(parameters, x.detach(), upstream)
        _sum_corrected(layer, x, samples.values())

    return run


def _sum_corrected(layer: nn.Linear, x: Tensor, samples: Iterable[Tensor]) -> None:
    share = (x.detach().square().sum(1) + 1).reciprocal()
    for parameter, own in zip(layer.parameters(), samples, strict=True):
        parameter.grad = (share @ own.flatten(1)).view_as(parameter)


def kfac(layer: nn.Linear, x: Tensor, upstream: Tensor, damping: float, every: int, *, swift: bool = False) -> Callable[[int], None]:
    """K-FAC with the empirical Fisher matrix, (gᵀg/N + …)⁻¹ ∇W (XᵀX/N + …)⁻¹ of the mean loss, as a pass that is told which step it is.

    swift: where N is smaller than d or o, by XXᵀ and ggᵀ (SKFAC).
    """
    import asdl

    config = asdl.PreconditioningConfig(data_size=len(x), damping=damping, preconditioner_upd_interval=every)
    maker = asdl.KfacGradientMaker(nn.Sequential(layer), config, fisher_type=asdl.FISHER_EMP, swift=swift)
    maker.setup_loss_call(_loss, maker.setup_model_call(maker.model, x), upstream)

    def run(step: int) -> None:
        x.grad = None
        layer.zero_grad(set_to_none=True)
        maker.state["step"] = step
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a non-full backward hook", FutureWarning)  # torch's, of the hooks that asdl sets
            maker.forward_and_backward()

    return run


def _loss(z: Tensor, upstream: Tensor, reduction: str = "mean") -> Tensor:
    # asdl asks for the sum where it makes its matrices, and divides by N itself; where it keeps them it does not.
    total = z.flatten().dot(upstream.flatten())
    return total if reduction == "sum" else total / len(z)
