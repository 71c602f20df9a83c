# The gradient-only corrections of nn.Conv2d against nn.Conv2d.
from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from affine_divergence.lab.benchmarks import _conv_layers
from affine_divergence.lab.benchmarks._conv_layers import FORMATS, PLAIN, Shape, laid_out
from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import one_pass
from affine_divergence.nn import BatchCorrectedConv2d, SampleCorrectedConv2d

FEW = Shape(8, 128, 7, 128, 3, padding=1)  # 392 positions, patches of 1152
SHAPES = (*_conv_layers.SHAPES, FEW)
BATCH_SHAPES = (_conv_layers.SHAPES[0], FEW)  # XᵀX of the patches costs as much as the convolution at d = o, and in float64
SAMPLE, BATCH = "SampleCorrectedConv2d", "BatchCorrectedConv2d"


def corrected_convs(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"convolutions, likewise; {BATCH} at {len(BATCH_SHAPES)} of the shapes"
    yield ""
    yield f"{'shape':<33}{'format':<15}{'layer':<24}{'form':<8}{'ms':>9}{f'/ {PLAIN}':>10}"
    for shape in SHAPES:
        for name, memory_format in FORMATS.items():
            modules, x, upstream = laid_out(shape, layers(shape), memory_format)
            seconds = interleaved({kind: one_pass(module, x, upstream) for kind, module in modules.items()}, repeats, warm=1)
            form = _form(upstream[:, 0].numel(), shape)
            for kind in modules:
                yield (
                    f"{shape!s:<33}{name:<15}{kind:<24}{form if kind == BATCH else '':<8}"
                    f"{1e3 * seconds[kind]:>9.2f}{seconds[kind] / seconds[PLAIN]:>10.3f}"
                )


def layers(shape: Shape) -> dict[str, nn.Module]:
    """What is timed at a shape."""
    kinds = {PLAIN: nn.Conv2d, SAMPLE: SampleCorrectedConv2d, BATCH: BatchCorrectedConv2d}
    return {name: shape.layer(kind) for name, kind in kinds.items() if name != BATCH or shape in BATCH_SHAPES}


def _form(positions: int, shape: Shape) -> str:
    return "dual" if positions <= shape.c_in // shape.groups * shape.kernel**2 + 1 else "primal"
