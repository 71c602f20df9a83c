# The patch-normalised convolutions against nn.Conv2d and nn.Conv2d + nn.BatchNorm2d.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import one_pass, saved_bytes
from affine_divergence.lab.errors import first_line
from affine_divergence.nn import PatchNormConv2d


@dataclass(frozen=True)
class Shape:
    """Square images, and the convolution of them."""

    images: int
    c_in: int
    side: int
    c_out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def layer(self, make: Callable[..., nn.Module], **options: object) -> nn.Module:
        return make(self.c_in, self.c_out, self.kernel, self.stride, self.padding, groups=self.groups, **options)

    def __str__(self) -> str:
        options = [f"k{self.kernel}", f"s{self.stride}" * (self.stride > 1), f"p{self.padding}", f"g{self.groups}" * (self.groups > 1)]
        return f"({self.images}, {self.c_in}→{self.c_out}, {self.side}×{self.side}) {' '.join(filter(None, options))}"


SHAPES = (
    Shape(64, 32, 32, 64, 3, padding=1),
    Shape(32, 64, 56, 64, 3, padding=1),
    Shape(32, 3, 224, 64, 7, stride=2, padding=3),
    Shape(32, 128, 28, 128, 3, padding=1, groups=128),
)
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
PLAIN, NORMED = "Conv2d", "Conv2d+BatchNorm2d"


def conv_layers(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"forward + backward, float32, CPU, 1 thread, torch {torch.__version__}: medians of {repeats} interleaved rounds, CPU time"
    yield f"affine-like, norm-like: PatchNormConv2d. {NORMED}: nn.Conv2d without a bias, then nn.BatchNorm2d in training mode."
    yield "compiled: by torch.compile before the clock starts, in ratio to the same eager layers. Saved: beyond input and parameters,"
    yield "in bytes, in sizes of the output, and in maps of one float32 for each image, group and position of the output."
    yield ""
    yield (
        f"{'shape':<33}{'format':<15}{'layer':<22}{'ms':>8}{f'/ {PLAIN}':>10}{f'/ {NORMED}':>21}"
        f"{'saved, bytes':>14}{'/ output':>10}{'/ map':>8}"
    )
    for shape in SHAPES:
        for name, memory_format in FORMATS.items():
            yield from (f"{shape!s:<33}{name:<15}{row}" for row in _rows(shape, memory_format, repeats))


def _rows(shape: Shape, memory_format: torch.memory_format, repeats: int) -> Iterator[str]:
    modules, x, upstream = laid_out(shape, _modules(shape), memory_format)
    compiled, failures = _compiled(modules, x, upstream)
    modules |= compiled
    seconds = interleaved({name: one_pass(module, x, upstream) for name, module in modules.items()}, repeats, warm=1)
    map_bytes = 4 * upstream[:, 0].numel() * shape.groups
    for name, module in modules.items():
        saved = saved_bytes(module, x)
        yield (
            f"{name:<22}{1e3 * seconds[name]:>8.2f}{seconds[name] / seconds[PLAIN]:>10.3f}{seconds[name] / seconds[NORMED]:>21.3f}"
            f"{saved:>14,}{saved / upstream.nbytes:>10.3f}{saved / map_bytes:>8.2f}"
        )
    for name, reason in failures.items():
        yield f"{name:<22}cannot be compiled here: {reason}"


def laid_out(
    shape: Shape, modules: dict[str, nn.Module], memory_format: torch.memory_format
) -> tuple[dict[str, nn.Module], Tensor, Tensor]:
    """The layers of a shape, images for them, and ∂L/∂z of what the plain one makes of these, in a memory format."""
    x = torch.randn(shape.images, shape.c_in, shape.side, shape.side).to(memory_format=memory_format).requires_grad_()
    modules = {name: module.to(memory_format=memory_format) for name, module in modules.items()}  # type: ignore[call-overload]
    with torch.no_grad():
        return modules, x, torch.randn_like(modules[PLAIN](x))


def _modules(shape: Shape) -> dict[str, nn.Module]:
    return {
        PLAIN: shape.layer(nn.Conv2d),
        NORMED: nn.Sequential(shape.layer(nn.Conv2d, bias=False), nn.BatchNorm2d(shape.c_out)),
        "affine-like": shape.layer(PatchNormConv2d, form="affine-like"),
        "norm-like": shape.layer(PatchNormConv2d, form="norm-like"),
    }


def _compiled(modules: dict[str, nn.Module], x: Tensor, upstream: Tensor) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The patch-normalised layers compiled, their first passes done, and why some could not be."""
    from torch._dynamo.exc import BackendCompilerFailed  # as where there is no C++ compiler

    done: dict[str, nn.Module] = {}
    failures: dict[str, str] = {}
    torch.compiler.reset()  # or the shapes before this one count as recompilations, of which few are allowed
    for form in ("affine-like", "norm-like"):
        name = f"{form} compiled"
        module = cast(nn.Module, torch.compile(modules[form], fullgraph=True, dynamic=False))
        try:
            one_pass(module, x, upstream)()
        except BackendCompilerFailed as error:
            failures[name] = f"{type(error.inner_exception).__name__}: {first_line(error.inner_exception)}"
        else:
            done[name] = module
    return done, failures
