# affdiv bench layers: forward and backward of the corrected linear layers, and what they save for the backward.
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from affine_divergence.lab.benchmarks._interleave import interleaved, one_thread
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear

SHAPES = ((512, 512, 512), (4096, 1024, 1024), (4096, 768, 3072))
PLAIN, NORMED, AFFINE, NORM = "Linear", "LayerNorm+Linear", "AffineLikeLinear", "NormLikeLinear"


def layers(repeats: int) -> str:
    """The table of `affdiv bench layers`."""
    text = [
        f"forward + backward, float32, CPU, eager, 1 thread, torch {torch.__version__}: medians of {repeats} interleaved rounds, CPU time",
        f"{NORMED}: nn.LayerNorm without parameters, then nn.Linear. Saved: beyond input and parameters, per row of the output.",
        "",
        f"{'shape':<22}{'layer':<18}{'ms':>9}{'/ Linear':>11}{'/ LayerNorm+Linear':>21}{'saved, bytes/row':>19}",
    ]
    with one_thread():
        for rows, d_in, d_out in SHAPES:
            modules = _modules(d_in, d_out)
            x = torch.randn(rows, d_in, requires_grad=True)
            upstream = torch.randn(rows, d_out)
            seconds = interleaved({name: _step(module, x, upstream) for name, module in modules.items()}, repeats)
            for name, module in modules.items():
                text.append(
                    f"{f'({rows}, {d_in}→{d_out})':<22}{name:<18}{1e3 * seconds[name]:>9.2f}{seconds[name] / seconds[PLAIN]:>11.3f}"
                    + f"{seconds[name] / seconds[NORMED]:>21.3f}{saved_bytes(module, x) / rows:>19.0f}"
                )
    return "\n".join(text)


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that the forward saves for the backward beyond its input and parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)  # kept alive, so that no two storages get one address
    del output
    return sum(saved.values())


def _modules(d_in: int, d_out: int) -> dict[str, nn.Module]:
    return {
        PLAIN: nn.Linear(d_in, d_out),
        NORMED: nn.Sequential(nn.LayerNorm(d_in, elementwise_affine=False), nn.Linear(d_in, d_out)),
        AFFINE: AffineLikeLinear(d_in, d_out),
        NORM: NormLikeLinear(d_in, d_out),
    }


def _step(module: nn.Module, x: Tensor, upstream: Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        module(x).backward(upstream)

    return step
