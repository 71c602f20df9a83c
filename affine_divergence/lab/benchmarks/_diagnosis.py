# What a diagnosis costs: a diagnosed step against a plain one, against the gradients of every sample, and the memory it takes.
from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from affine_divergence.diagnostics import Monitor, diagnose
from affine_divergence.lab.benchmarks._interleave import interleaved, one_thread

EVERY = 100
CHUNK = 32  # samples whose gradients are in memory at once; all of the MLP's would be 5.4 GB
PLAIN, CHANGE, COLUMN, SPARSE = "plain step", "Monitor, every=1, plain=False", "Monitor, every=1", f"Monitor, every={EVERY}"
DIAGNOSE, RANK, COUNTERFACTUAL = "diagnose, without rank and counterfactual", "diagnose, with rank", "diagnose, with counterfactual"
SAMPLES = "vmap(grad), gradients of every sample"
LIMITS = {CHANGE: 1.6, DIAGNOSE: 3.0, SPARSE: 1.05}


@dataclass(frozen=True)
class Net:
    """A model, its batch, and how many times cheaper than the gradients of every sample a diagnosed step is to be."""

    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    labels: Tensor
    cheaper: float


def diagnosis(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"a step of SGD, cross-entropy, float32, CPU, 1 thread, torch {torch.__version__}: medians of {repeats} interleaved rounds"
    yield f"{SPARSE}: the mean of {EVERY - 1} steps that are not logged and one that is. diagnose: the whole call, from the snapshot of"
    yield "the model to having it back; rank and counterfactual have no limit, nor has the memory that holds the model as it was."
    yield f"vmap(grad): the gradients of every sample and no step, {CHUNK} samples at a time; it is held against what the diagnosis adds to"
    yield "a step, and against the whole step."
    with one_thread():
        for net in nets():
            yield ""
            yield from _table(net, repeats)
            yield from _memory(net)


def nets() -> tuple[Net, ...]:
    """The two that are measured."""
    torch.manual_seed(0)  # of the data alone
    return (
        Net("MLP 512→1024→1024→1024→10, batch 512", _mlp, torch.randn(512, 512), torch.randint(0, 10, (512,)), 5.0),
        Net("ConvNet 3→32→64→128, 32 × 32, batch 64", _convnet, torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)), 1.0),
    )


def _mlp() -> nn.Module:
    sizes = (512, 1024, 1024, 1024, 10)
    layers = [module for d, o in itertools.pairwise(sizes) for module in (nn.Linear(d, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _convnet() -> nn.Module:
    blocks = [m for c, o in ((3, 32), (32, 64), (64, 128)) for m in (nn.Conv2d(c, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))


def _step(net: Net, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(net.x), net.labels).backward()
    optimizer.step()


def _table(net: Net, repeats: int) -> Iterator[str]:
    seconds = interleaved(_pieces(net), repeats)
    seconds[SPARSE] = ((EVERY - 1) * seconds[SPARSE] + seconds[COLUMN]) / EVERY
    plain = seconds[PLAIN]
    yield f"{net.name:<46}{'ms':>9}{'/ plain':>9}"
    for name, value in seconds.items():
        limit = LIMITS.get(name)
        holds = "" if limit is None else f"  at most {limit:g}: {'holds' if value <= limit * plain else 'exceeded'}"
        yield f"{name:<46}{1e3 * value:>9.1f}{value / plain:>9.3f}{holds}"
    yield ""
    samples, added = seconds[SAMPLES], seconds[CHANGE] - plain
    ratio = samples / added if added > 0.0 else math.inf
    holds = "holds" if ratio >= net.cheaper else "missed"
    yield f"{SAMPLES} / what {CHANGE} adds: {ratio:.1f}  at least {net.cheaper:g}: {holds}"
    yield f"{SAMPLES} / the whole step with it: {samples / seconds[CHANGE]:.2f}"


@dataclass(frozen=True)
class _Piece:
    model: nn.Module
    run: Callable[[], object]


def _pieces(net: Net) -> dict[str, Callable[[], object]]:
    return {
        PLAIN: _trained(net).run,
        CHANGE: _trained(net, 1, plain=False).run,
        COLUMN: _trained(net, 1).run,
        SPARSE: _trained(net, 10**9).run,
        DIAGNOSE: _diagnosed(net, rank=False, counterfactual=False).run,
        RANK: _diagnosed(net, rank=True, counterfactual=False).run,
        COUNTERFACTUAL: _diagnosed(net, rank=False, counterfactual=True).run,
        SAMPLES: _samples(net),
    }


def _trained(net: Net, every: int | None = None, plain: bool = True) -> _Piece:
    model = net.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = functools.partial(_step, net, model, optimizer)
    if every is not None:
        Monitor(model, optimizer, every, plain=plain).attach()
        step()  # the first step is logged
    return _Piece(model, step)


def _diagnosed(net: Net, **options: Any) -> _Piece:
    model = net.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return _Piece(model, functools.partial(diagnose, model, net.x, net.labels, F.cross_entropy, optimizer=optimizer, **options))


def _samples(net: Net) -> Callable[[], object]:
    model = net.make()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, values, (x.unsqueeze(0),)), label.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def run() -> None:
        for x, labels in zip(net.x.split(CHUNK), net.labels.split(CHUNK), strict=True):
            gradients(parameters, x, labels)

    return run


def _memory(net: Net) -> Iterator[str]:
    """Bytes at the peak of a step, beyond those at the peak of a plain one, against those of what is captured."""
    captured = _captured(net)
    plain = _peak(_trained(net))
    measured = {
        CHANGE: _trained(net, 1, plain=False),
        COLUMN: _trained(net, 1),
        DIAGNOSE: _diagnosed(net, rank=False, counterfactual=False),
    }
    for name, piece in measured.items():
        extra = _peak(piece) - plain
        limit = "" if name == DIAGNOSE else f"  at most 2: {'holds' if extra <= 2 * captured else 'exceeded'}"
        yield (
            f"{name}: peak memory {extra / 2**20:.1f} MiB above a plain step's, {extra / captured:.2f} of the {captured / 2**20:.1f} MiB "
            f"captured{limit}"
        )


def _peak(piece: _Piece) -> int:
    piece.run()
    piece.model.zero_grad()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        piece.run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _captured(net: Net) -> int:
    """Inputs and output gradients of all layers, each once."""
    model = net.make()
    sizes = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda _, args, z: sizes.append(args[0].nbytes + z.nbytes))
    model(net.x)
    return sum(sizes)
