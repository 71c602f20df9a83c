# affdiv bench training: the lab's stacks against the loop that a user would write, on the same trials.
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from affine_divergence.lab.benchmarks._interleave import interleaved, one_thread
from affine_divergence.lab.training._seeds import image_order
from affine_divergence.lab.training._stack import Stack, sort_key
from affine_divergence.lab.training._train import descend
from affine_divergence.lab.trial import FULLY_CONNECTED, GRADIENT_ONLY, Cell, Method, Optimizer, Trial
from affine_divergence.nn import AffineLikeLinear, NormLikeLinear

IMAGES, FEATURES, CLASSES, DEPTH = 45_000, 3072, 10, 3  # the training part of CIFAR-10
SHAPES: tuple[tuple[Optimizer, int, int], ...] = (  # width, batch size
    ("sgd", 16, 32),
    ("sgd", 64, 32),
    ("sgd", 64, 128),
    ("adamw", 16, 32),
    ("adamw", 64, 32),
)
OPTIMIZERS: Mapping[Optimizer, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
METHODS: tuple[Method, ...] = ("none", "affine-like", "batch-norm")
REPLICAS = 16
SIX = tuple(method for method in FULLY_CONNECTED if method not in GRADIENT_ONLY)
ALL, SEEDS = "all six × 3", 3  # as a study tests: one rate a method, several seeds
ROWS_A_ROUND = 3200  # images that each replica sees in a round
NORMS: Mapping[Method, Callable[[int], nn.Module]] = {
    "batch-norm": lambda d: nn.BatchNorm1d(d, affine=False),
    "layer-norm": lambda d: nn.LayerNorm(d, elementwise_affine=False),
    "rms-norm": lambda d: nn.RMSNorm(d, elementwise_affine=False),
}
LINEAR: Mapping[Method, Callable[[int, int], nn.Module]] = {"norm-like": NormLikeLinear, "affine-like": AffineLikeLinear}


def training(repeats: int) -> Iterator[str]:
    """The lines of `affdiv bench training`, each as soon as it is measured."""
    yield f"{FEATURES}-w-w-w-{CLASSES}, Tanh, float32, {IMAGES:,} images in memory, CPU, 1 thread, torch {torch.__version__}"
    yield (
        f"medians of {repeats} interleaved rounds of {ROWS_A_ROUND:,} images a replica, CPU time, without evaluation; an epoch: {IMAGES:,}"
    )
    yield "usual: an nn.Sequential a trial, DataLoader over a TensorDataset, optim.SGD or AdamW. stacked: one batched model."
    yield f"{REPLICAS} learning rates of one method and one seed; {ALL}: one rate of each method, {SEEDS} seeds."
    yield ""
    yield f"{'':<9}{'width':>5}{'batch':>7}  {'method':<13}{'replica-epochs / CPU s':>26}{'':>6}{'GFLOP/s':>20}"
    yield f"{'':<9}{'':>5}{'':>7}  {'':<13}{'usual':>13}{'stacked':>13}{'ratio':>8}{'usual':>9}{'stacked':>9}"
    inputs = torch.randn(IMAGES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (IMAGES,), generator=torch.Generator().manual_seed(1))
    with one_thread():
        for (optimizer, width, batch_size), name in itertools.product(SHAPES, (*METHODS, ALL)):
            trials = _trials(optimizer, width, batch_size, name)
            pieces = {"usual": _usual(trials, inputs, labels), "stacked": _stacked(trials, inputs, labels)}
            seconds = interleaved(pieces, repeats, warm=1)
            epochs = len(trials) * (ROWS_A_ROUND // batch_size) * batch_size / IMAGES
            usual, stacked = (epochs / seconds[side] for side in pieces)
            flops = 1e-9 * IMAGES * _operations(width)
            yield (
                f"{optimizer:<9}{width:>5}{batch_size:>7}  {name:<13}{usual:>13.2f}{stacked:>13.2f}{stacked / usual:>8.2f}"
                f"{usual * flops:>9.1f}{stacked * flops:>9.1f}"
            )


def _trials(optimizer: Optimizer, width: int, batch_size: int, name: str) -> list[Trial]:
    wanted: list[tuple[Method, float, int]]
    if name == ALL:
        wanted = [(method, 0.01, seed) for method in SIX for seed in range(SEEDS)]
    else:
        wanted = [(method, 0.001 * (1 + place), 0) for method in METHODS if method == name for place in range(REPLICAS)]
    shape = Cell("synthetic", "none", width, DEPTH, "tanh", batch_size, 1, None, optimizer=optimizer)
    return [replace(shape, method=method).trial(rate, seed, "evaluation") for method, rate, seed in wanted]


def _operations(width: int) -> int:
    # Floating-point operations of an image: each weight takes part in a product forward, one for its own gradient and,
    # but for the first layer's, one for the gradient of its input.
    first, rest = FEATURES * width, (DEPTH - 1) * width**2 + width * CLASSES
    return 4 * first + 6 * rest


def _usual(trials: list[Trial], inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    dataset = TensorDataset(inputs, labels)
    nets = [_net(trial) for trial in trials]
    optimizers = [OPTIMIZERS[trial.optimizer](net.parameters(), lr=trial.learning_rate) for net, trial in zip(nets, trials, strict=True)]
    batch_size = trials[0].batch_size

    def run() -> None:
        for net, optimizer in zip(nets, optimizers, strict=True):
            loader = DataLoader(dataset, batch_size, shuffle=True)
            for images, targets in itertools.islice(loader, ROWS_A_ROUND // batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images), targets).backward()
                optimizer.step()

    return run


def _stacked(trials: list[Trial], inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    stack = Stack(sorted(trials, key=sort_key), (1, 1, FEATURES), CLASSES, inputs)
    batch_size = trials[0].batch_size

    def batches() -> Iterator[Tensor]:
        order = torch.stack([image_order(seed, 0, IMAGES) for seed in stack.seeds])
        yield from itertools.islice(order.split(batch_size, dim=1), ROWS_A_ROUND // batch_size)

    def run() -> None:
        descend(stack, inputs, labels, batches())

    return run


def _net(trial: Trial) -> nn.Sequential:
    sizes = [FEATURES, *[trial.width] * trial.depth, CLASSES]
    layers: list[nn.Module] = []
    for layer, (n_in, n_out) in enumerate(itertools.pairwise(sizes)):
        if layer:
            layers.append(nn.Tanh())
        if trial.method in NORMS:
            layers.append(NORMS[trial.method](n_in))
        layers.append(LINEAR.get(trial.method, nn.Linear)(n_in, n_out))
    return nn.Sequential(*layers)
