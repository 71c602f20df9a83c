# The table of what is diagnosed against the oracle: layers, shapes, frozen parts, reuse, losses, optimisers; all float64 and tiny.
from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import diagnosis_oracles as oracles
import torch
import transformers
from split_attention import split
from torch import Tensor, nn
from torch.nn import functional as F

from affine_divergence.nn import (
    AffineLikeLinear,
    BatchCorrectedConv2d,
    BatchCorrectedLinear,
    NormLikeLinear,
    PatchNormConv2d,
    PatchNormConvTranspose1d,
    SampleCorrectedConv2d,
    SampleCorrectedLinear,
)

WIDE = torch.float64
Optimise = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A model, one batch, a loss and an optimiser; `twin` makes of a copy of the model one that the oracle can take apart."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    loss_fn: Callable[..., Tensor]
    optimise: Optimise
    twin: Callable[[nn.Module], nn.Module]

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make().to(WIDE)

    def loss(self, model: nn.Module) -> Tensor:
        inputs, targets = self.batch()
        z = called(model, inputs)
        return self.loss_fn(z) if targets is None else self.loss_fn(z, targets)


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's output on inputs as `diagnose` takes them."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def rows(*shape: int, seed: int = 1) -> Tensor:
    """Rows whose lengths go from a third to three."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.logspace(-0.5, 0.5, shape[0], dtype=WIDE).reshape(-1, *[1] * (len(shape) - 1))
    return lengths * torch.randn(*shape, dtype=WIDE, generator=generator)


def bent(z: Any) -> Tensor:
    """A loss whose ∂L/∂z is different in every entry."""
    z = z[0] if isinstance(z, tuple) else z
    ramp = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
    return (z - ramp).square().mean() + 0.1 * (z * ramp).sin().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """One step of a training on these rows; its loss."""
    optimizer.zero_grad()
    loss = bent(model(x))
    loss.backward()
    optimizer.step()
    return loss.item()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def case(
    make: Callable[[], nn.Module],
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[..., Tensor] = bent,
    optimise: Optimise = sgd,
    twin: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Case:
    return Case(make, lambda: (copy.deepcopy(inputs), targets), loss_fn, optimise, twin)


def then_tanh(layer: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """The layer between a scaling, so that rows depend on something before, and an activation."""
    return lambda: nn.Sequential(layer(*args, **kwargs), nn.Tanh())


def frozen(make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return made


class Mlp(nn.Module):
    """Two linear layers and an activation in place after the first."""

    def __init__(self, *, inplace: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(5, 7), nn.Linear(7, 4), nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.act(self.first(x)))
        return out


class Reused(nn.Module):
    """One layer called three times, once with its input by keyword, once with an output that no one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        self.layer(y + 1)
        out: Tensor = self.layer(input=y[:3])
        return out


class TwoLosses(nn.Module):
    """An output that goes into two parts of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.cat([z.tanh(), self.head(z.relu())], -1)


class Words(nn.Module):
    """An embedding and a head, which may share the weight."""

    def __init__(self, *, tied: bool, **options: Any) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = nn.Embedding(6, 5, **options), nn.Linear(5, 5), nn.Linear(5, 6, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.embedding(tokens)).tanh())
        return out


class Attends(nn.Module):
    """An attention between two linear layers, called as people call it."""

    def __init__(self, *, cross: bool = False, need_weights: bool = True, masked: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.before, self.attention, self.after = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, **options), nn.Linear(4, 3)
        for bias in (self.attention.in_proj_bias, self.attention.out_proj.bias):  # zeros at the start: a bias that moves is seen better
            if bias is not None:
                nn.init.normal_(bias)
        self.cross, self.need_weights, self.masked, self.batch_first = cross, need_weights, masked, options.get("batch_first", False)

    def forward(self, x: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        y = self.before(x)
        key = y if key is None else key
        value = key if value is None else value
        options: dict[str, Any] = {} if self.need_weights else {"need_weights": False}
        if self.masked:
            n, s = (key.shape[0], key.shape[1]) if self.batch_first else (key.shape[1], key.shape[0])
            options["key_padding_mask"] = torch.arange(s).expand(n, s) >= torch.arange(s, s - n, -1).unsqueeze(1)
        out: Tensor = self.after(self.attention(y, key, value, **options)[0])
        return out


def convnet() -> nn.Module:
    """Two convolutions with a normaliser and an activation in place between them, and a linear head."""
    convs = nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 2)
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(12, 3))


def attention(*shapes: tuple[int, ...], **options: Any) -> Case:
    made = tuple(rows(*shape, seed=i) for i, shape in enumerate(shapes))
    return case(lambda: Attends(**options), made, twin=split)


def _linear() -> Iterator[tuple[str, Case]]:
    for shape in ((6, 5), (4, 3, 5), (2, 3, 2, 5), (2, 2, 2, 2, 5)):
        yield f"linear {len(shape)}-D", case(then_tanh(nn.Linear, 5, 4), rows(*shape))
    yield "linear without bias", case(then_tanh(nn.Linear, 5, 4, bias=False), rows(6, 5))
    yield "linear alone is the model", case(lambda: nn.Linear(5, 4), rows(6, 5))
    yield "one row", case(then_tanh(nn.Linear, 5, 4), rows(1, 5))
    yield "more rows than inputs", case(then_tanh(nn.Linear, 2, 4), rows(9, 2))
    yield "rows that repeat", case(then_tanh(nn.Linear, 9, 3), torch.cat([rows(3, 9)] * 2))
    yield "frozen weight", case(frozen(then_tanh(nn.Linear, 5, 4), "0.weight"), rows(6, 5))
    yield "frozen bias", case(frozen(then_tanh(nn.Linear, 5, 4), "0.bias"), rows(6, 5))
    yield "in-place activation", case(Mlp, rows(6, 5))
    yield "reused", case(Reused, rows(6, 4))
    yield "two losses", case(TwoLosses, rows(6, 5))
    yield "inputs by keyword", case(Mlp, {"x": rows(6, 5)})
    yield "weight transposed", case(then_tanh(transformers.pytorch_utils.Conv1D, 4, 5), rows(2, 3, 5))
    yield "strided input", case(then_tanh(nn.Linear, 5, 4), rows(6, 10)[:, ::2])


def _convolutions() -> Iterator[tuple[str, Case]]:
    one, two, three = rows(3, 4, 9), rows(2, 4, 6, 5), rows(2, 2, 3, 4, 3)
    yield "conv1d", case(then_tanh(nn.Conv1d, 4, 6, 3), one)
    yield "conv1d unbatched", case(then_tanh(nn.Conv1d, 4, 6, 3), one[0])
    yield "conv1d groups dilation", case(then_tanh(nn.Conv1d, 4, 6, 3, dilation=2, groups=2, bias=False), one)
    yield "conv1d same even", case(then_tanh(nn.Conv1d, 4, 2, 4, padding="same"), one)
    yield "conv2d stride that floors", case(then_tanh(nn.Conv2d, 4, 3, 3, stride=2), two)
    yield "conv2d 1x1", case(then_tanh(nn.Conv2d, 4, 3, 1), two)
    yield "conv2d depthwise", case(then_tanh(nn.Conv2d, 4, 8, 3, padding=1, groups=4), two)
    for mode in ("circular", "reflect", "replicate"):
        yield f"conv2d {mode}", case(then_tanh(nn.Conv2d, 4, 4, 3, padding=(2, 1), groups=2, padding_mode=mode), two)
    yield "conv2d same circular", case(then_tanh(nn.Conv2d, 4, 4, (2, 3), padding="same", padding_mode="circular"), two)
    yield "conv2d frozen weight", case(frozen(then_tanh(nn.Conv2d, 4, 4, 3, groups=2), "0.weight"), two)
    yield "conv2d frozen bias", case(frozen(then_tanh(nn.Conv2d, 4, 4, 3, groups=2), "0.bias"), two)
    yield "conv2d channels last", case(then_tanh(nn.Conv2d, 4, 3, 3), two.to(memory_format=torch.channels_last))
    yield "conv3d", case(then_tanh(nn.Conv3d, 2, 4, 2, stride=(1, 2, 1), padding=(0, 1, 1), groups=2), three)
    yield "transposed 1d", case(then_tanh(nn.ConvTranspose1d, 4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), one)
    yield "transposed 2d", case(then_tanh(nn.ConvTranspose2d, 4, 3, (3, 2), stride=(2, 1), dilation=(1, 2), bias=False), two)
    yield "transposed 3d", case(then_tanh(nn.ConvTranspose3d, 2, 2, 2, stride=2), three[:1])
    yield "convolutions and a head", case(convnet, two)


def _embeddings() -> Iterator[tuple[str, Case]]:
    tokens = torch.tensor([[0, 1, 1], [5, 2, 1], [0, 0, 3]])
    labels = torch.tensor([[1, 1, 2], [2, 1, 3], [0, 3, 3]])
    ignored = torch.tensor([[1, -100, 2], [2, 1, -100], [-100, 3, 3]])

    def entropy(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    def summed(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")

    yield "embedding", case(lambda: Words(tied=False), tokens, labels, entropy)
    yield "embedding sum loss", case(lambda: Words(tied=False), tokens, labels, summed)
    yield "embedding ignored labels", case(lambda: Words(tied=False), tokens, ignored, entropy)
    yield "embedding padding", case(lambda: Words(tied=False, padding_idx=1), tokens, labels, entropy)
    yield "embedding of sparse gradients", case(lambda: Words(tied=False, sparse=True), tokens, labels, entropy)
    yield "embedding tied to the head", case(lambda: Words(tied=True), tokens, labels, entropy)


def _attentions() -> Iterator[tuple[str, Case]]:
    yield "attention", attention((5, 2, 4))
    yield "attention batch first", attention((2, 5, 4), batch_first=True)
    yield "attention without weights", attention((2, 5, 4), batch_first=True, need_weights=False)
    yield "attention padded", attention((2, 5, 4), batch_first=True, masked=True)
    yield "attention padded without weights", attention((5, 2, 4), masked=True, need_weights=False)
    yield "attention without bias", attention((5, 2, 4), bias=False)
    yield "cross attention", attention((5, 2, 4), (3, 2, 4))
    yield "cross attention of other sizes", attention((2, 5, 4), (2, 3, 6), (2, 3, 7), kdim=6, vdim=7, batch_first=True, need_weights=False)
    yield "attention with bias_k", attention((5, 2, 4), add_bias_kv=True)
    yield "attention with a zero", attention((5, 2, 4), add_zero_attn=True)
    yield "attention unbatched", attention((5, 4))
    weights = frozen(Attends, "attention.in_proj_bias", "attention.out_proj.weight")
    yield "attention partly frozen", case(weights, rows(5, 2, 4), twin=split)


def _corrected() -> Iterator[tuple[str, Case]]:
    flat, image = rows(6, 5), rows(2, 4, 5, 4)
    yield "affine-like", case(then_tanh(AffineLikeLinear, 5, 4, gain=2.0), flat)
    yield "affine-like without bias", case(then_tanh(AffineLikeLinear, 5, 4, bias=False), flat)
    yield "affine-like frozen weight", case(frozen(then_tanh(AffineLikeLinear, 5, 4), "0.weight"), flat)
    yield "norm-like", case(then_tanh(NormLikeLinear, 5, 4, gain=2.0, eps=0.5), flat)
    yield "norm-like default eps", case(then_tanh(NormLikeLinear, 5, 4), flat)
    yield "patch norm", case(then_tanh(PatchNormConv2d, 4, 4, 3, padding=1, groups=2, gain=2.0), image)
    yield "patch norm norm-like", case(then_tanh(PatchNormConv2d, 4, 3, 2, stride=2, form="norm-like", padding_mode="circular"), image)
    yield "patch norm transposed", case(then_tanh(PatchNormConvTranspose1d, 4, 4, 3, stride=2, groups=2), rows(2, 4, 5))
    yield "sample-corrected", case(then_tanh(SampleCorrectedLinear, 5, 4), flat)
    yield "sample-corrected conv", case(then_tanh(SampleCorrectedConv2d, 4, 4, 3, groups=2, bias=False), image)
    yield "batch-corrected", case(then_tanh(BatchCorrectedLinear, 5, 4), flat)
    yield "batch-corrected conv", case(then_tanh(BatchCorrectedConv2d, 4, 4, 3, groups=2, bias=False), image)


def _groups_of_rates(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return torch.optim.SGD([{"params": weights, "lr": 0.02}, {"params": biases, "lr": 0.7}], lr=0.1)


OPTIMISERS: dict[str, Optimise] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, maximize=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.3),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "groups of rates": _groups_of_rates,
}


def _optimisers() -> Iterator[tuple[str, Case]]:
    for name, optimise in OPTIMISERS.items():
        yield name, case(Mlp, rows(6, 5), optimise=optimise)


CASES = dict(entry for part in (_linear, _convolutions, _embeddings, _attentions, _corrected, _optimisers) for entry in part())


def against_the_oracle(found: Any, twin: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """A diagnosis of plain descent at the rate of `sgd` has the oracle's rows; the twin is left after a step."""
    wanted, _ = oracles.diagnosis(twin, sgd(twin), loss)
    assert {(row.module, row.call) for row in found.rows} == set(wanted)
    for row in found.rows:
        agree(row, wanted[row.module, row.call])


def statuses(found: Any) -> dict[str, tuple[str, str]]:
    """Status and reason of every module of the coverage."""
    return {line.module: (line.status, line.reason) for line in found.coverage}


def agree(found: Any, wanted: Mapping[str, float], *, rel: float = 1e-8) -> None:
    """The row of a diagnosis has all the numbers of the oracle's."""
    differences = []
    for name, value in wanted.items():
        got = getattr(found, name)
        if got is None or not (abs(got - value) <= rel * abs(value) + 1e-10 or (math.isnan(got) and math.isnan(value))):
            differences.append(f"{name} is {got}, not {value}")
    assert not differences, f"{found.module}, call {found.call}: " + "; ".join(differences)
