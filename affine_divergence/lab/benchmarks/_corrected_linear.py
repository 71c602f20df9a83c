# The gradient-only corrections of nn.Linear against nn.Linear, and against what others offer that comes nearest.
from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from affine_divergence.lab.benchmarks._interleave import interleaved
from affine_divergence.lab.benchmarks._passes import one_pass
from affine_divergence.lab.benchmarks._rivals import FIRST, LATER, PACKAGES, kfac, missing, opacus_samples, vmap_samples
from affine_divergence.nn import BatchCorrectedLinear, SampleCorrectedLinear

LIMITED = ((4096, 1024, 1024), (4096, 768, 3072))  # where the sample correction is to cost at most LIMIT
SHAPES = ((64, 1024, 1024), (256, 1024, 1024), *LIMITED)
LIMIT = 1.1
DAMPING, DECAY, EVERY = 1e-3, 0.95, 50
SAMPLES_BYTES = 2**31  # gradients of every sample above this are not tried
PLAIN, SAMPLE, BATCH = "Linear", "SampleCorrectedLinear", "BatchCorrectedLinear"
AVERAGE = f"{BATCH}, decay {DECAY:g}"
AVERAGE_KEPT = f"{AVERAGE}, every {EVERY}"
OPACUS, VMAP = "opacus, samples summed", "vmap(grad), samples summed"
KFAC, SKFAC, KFAC_KEPT = "asdl, K-FAC", "asdl, SKFAC", f"asdl, K-FAC, made every {EVERY}"


class Row(NamedTuple):
    """A layer, and what is timed: a pass, or that of most steps and that of one in EVERY. Or why there is nothing."""

    layer: nn.Linear | None
    passes: tuple[Callable[[], None], ...] = ()
    form: str = ""
    instead: str = ""


def corrected_linear(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"forward + backward, float32, CPU, eager, 1 thread, torch {torch.__version__}: medians of {repeats} interleaved rounds, CPU time"
    yield from _explained()
    yield ""
    yield f"{'shape':<20}{'layer':<44}{'form':<8}{'ms':>9}{'/ Linear':>10}  at most {LIMIT}"
    for shape in SHAPES:
        rows, d_in, d_out = shape
        seconds = _seconds(table(torch.randn(rows, d_in, requires_grad=True), torch.randn(rows, d_out)), repeats)
        for name, (row, mean) in seconds.items():
            start = f"{f'({rows}, {d_in}→{d_out})':<20}{name:<44}{row.form:<8}"
            if mean is None:
                yield start + row.instead
                continue
            ratio = mean / (seconds[PLAIN][1] or mean)
            limited = name == SAMPLE and shape in LIMITED
            yield f"{start}{1e3 * mean:>9.2f}{ratio:>10.3f}  {('holds' if ratio <= LIMIT else 'exceeded') if limited else ''}".rstrip()


def table(x: Tensor, upstream: Tensor) -> dict[str, Row]:
    """What is timed on these rows and ∂L/∂z, each with a layer of its own."""
    sizes, dtype = (x.shape[1], upstream.shape[1]), x.dtype
    make = functools.partial(BatchCorrectedLinear, *sizes, dtype=dtype, damping=DAMPING)
    plain, sample = nn.Linear(*sizes, dtype=dtype), SampleCorrectedLinear(*sizes, dtype=dtype)
    batch, average, kept = make(), make(decay=DECAY), make(decay=DECAY, every=EVERY)
    form = "dual" if len(x) <= x.shape[1] + 1 else "primal"
    passes = {layer: one_pass(layer, x, upstream) for layer in (plain, sample, batch, average, kept)}

    def inverted() -> None:
        kept.reset_average()
        passes[kept]()

    return {
        PLAIN: Row(plain, (passes[plain],)),
        SAMPLE: Row(sample, (passes[sample],)),
        BATCH: Row(batch, (passes[batch],), form),
        AVERAGE: Row(average, (passes[average],), "primal"),
        AVERAGE_KEPT: Row(kept, (passes[kept], inverted), "primal"),
        **_sampled(x, upstream),
        **_preconditioned(x, upstream),
    }


def _sampled(x: Tensor, upstream: Tensor) -> dict[str, Row]:
    """The gradient of every sample, then their corrected sum."""
    layers = [nn.Linear(x.shape[1], upstream.shape[1], dtype=x.dtype) for _ in range(2)]
    size = layers[0].weight.nbytes * len(x)
    if size > SAMPLES_BYTES:
        return {name: Row(None, instead=f"not run: the gradients of all samples are {1e-9 * size:.1f} GB") for name in (OPACUS, VMAP)}
    why = missing("opacus")
    return {
        OPACUS: Row(None, instead=why) if why else Row(layers[0], (opacus_samples(layers[0], x, upstream),)),
        VMAP: Row(layers[1], (vmap_samples(layers[1], x, upstream),)),
    }


def _preconditioned(x: Tensor, upstream: Tensor) -> dict[str, Row]:
    """K-FAC, where N is the smaller also by Gram matrices."""
    names = [KFAC, *[SKFAC] * (len(x) < max(x.shape[1], upstream.shape[1])), KFAC_KEPT]
    if why := missing("asdl"):
        return {name: Row(None, instead=why) for name in names}
    layers = [nn.Linear(x.shape[1], upstream.shape[1], dtype=x.dtype) for _ in range(2)]
    steps, swift_steps = (kfac(layer, x, upstream, DAMPING, EVERY, swift=swift) for layer, swift in zip(layers, (False, True), strict=True))
    make, keep, make_swift = functools.partial(steps, FIRST), functools.partial(steps, LATER), functools.partial(swift_steps, FIRST)
    make()  # or there is nothing to keep
    rows = {KFAC: Row(layers[0], (make,)), SKFAC: Row(layers[1], (make_swift,)), KFAC_KEPT: Row(layers[0], (keep, make))}
    return {name: rows[name] for name in names}


def _seconds(rows: dict[str, Row], repeats: int) -> dict[str, tuple[Row, float | None]]:
    """The rows with the mean time of a step."""
    names = {one: str(place) for place, one in enumerate({one: None for row in rows.values() for one in row.passes})}
    times = interleaved({name: one for one, name in names.items()}, repeats, warm=1)
    means: dict[str, tuple[Row, float | None]] = {}
    for name, row in rows.items():
        seconds = [times[names[one]] for one in row.passes]
        if len(seconds) == 2:
            seconds = [((EVERY - 1) * seconds[0] + seconds[1]) / EVERY]
        means[name] = row, seconds[0] if seconds else None
    return means


def _explained() -> Iterator[str]:
    opacus, asdl = ("" if missing(module) else f" {importlib.metadata.version(PACKAGES[module])}" for module in ("opacus", "asdl"))
    yield f"Every step ends with the gradients to descend along, and ∂L/∂x. N rows, damping {DAMPING:g}."
    yield f"{BATCH}: a solve with XXᵀ (dual) or XᵀX (primal) of the batch, in float64; with a decay with the average of XᵀX, which every"
    yield f"  step counts in; every {EVERY}: the mean of {EVERY - 1} steps that keep the inverse and one that makes it, both timed."
    yield f"opacus{opacus}: the gradients of all samples, N·d·o numbers, beside the plain one; then their sum, each over its ‖x‖² + 1,"
    yield f"  which is what {SAMPLE} computes. vmap(grad): the same by torch.func."
    yield f"asdl{asdl}, K-FAC: the plain gradient times the inverses of XᵀX/N and of gᵀg/N, by Cholesky, in float32: two where the batch"
    yield f"  correction has the first. SKFAC: by XXᵀ, ggᵀ where N is the smaller. Made every {EVERY}: one step makes both matrices and"
    yield f"  their inverses, {EVERY - 1} only multiply; there is no average, which asdl has on CUDA builds of torch alone."
