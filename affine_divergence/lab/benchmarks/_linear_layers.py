# The corrected linear layers against nn.Linear and LayerNorm + nn.Linear.
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import one_pass, saved_bytes
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear

SHAPES = ((512, 512, 512), (4096, 1024, 1024), (4096, 768, 3072))
PLAIN, NORMED, AFFINE, NORM = "Linear", "LayerNorm+Linear", "AffineLikeLinear", "NormLikeLinear"


def linear_layers(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"forward + backward, float32, CPU, eager, 1 thread, torch {torch.__version__}: medians of {repeats} interleaved rounds, CPU time"
    yield f"{NORMED}: nn.LayerNorm without parameters, then nn.Linear. Saved: beyond input and parameters, per row of the output."
    yield ""
    yield f"{'shape':<22}{'layer':<18}{'ms':>9}{'/ Linear':>11}{'/ LayerNorm+Linear':>21}{'saved, bytes/row':>19}"
    for rows, d_in, d_out in SHAPES:
        modules = _modules(d_in, d_out)
        x = torch.randn(rows, d_in, requires_grad=True)
        upstream = torch.randn(rows, d_out)
        seconds = interleaved({name: one_pass(module, x, upstream) for name, module in modules.items()}, repeats)
        for name, module in modules.items():
            yield (
                f"{f'({rows}, {d_in}→{d_out})':<22}{name:<18}{1e3 * seconds[name]:>9.2f}{seconds[name] / seconds[PLAIN]:>11.3f}"
                f"{seconds[name] / seconds[NORMED]:>21.3f}{saved_bytes(module, x) / rows:>19.0f}"
            )


def _modules(d_in: int, d_out: int) -> dict[str, nn.Module]:
    return {
        PLAIN: nn.Linear(d_in, d_out),
        NORMED: nn.Sequential(nn.LayerNorm(d_in, elementwise_affine=False), nn.Linear(d_in, d_out)),
        AFFINE: AffineLikeLinear(d_in, d_out),
        NORM: NormLikeLinear(d_in, d_out),
    }
