# Layers whose input is a parameter, which the step changes before the rows are told: learned queries, one weight through another.
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diagnosis_cases import bent, rows, statuses
from torch import Tensor, nn

import affine_divergence as ad

X = rows(4, 6, 8)


class _Pooled(nn.Module):
    """Attention with a learned query, by a layer of its own and as one of nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, 8))
        self.q, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        query = self.latent.expand(len(x), -1, -1)
        out: Tensor = self.attention(query, x, x)[0] + self.q(query)
        return out


class _Through(nn.Module):
    """A linear layer applied to a part of the weight of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer(self.embedding.weight[1:4]).mT


class _ByData(torch.optim.SGD):
    """Writes as optimisers of old do, which no version counts."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad.data)


OPTIMISERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.03, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.03, fused=True),
    "data": lambda model: _ByData(model.parameters(), lr=0.03),
}


def _diagnosed(model: nn.Module, optimizer: torch.optim.Optimizer) -> ad.Diagnosis:
    return ad.diagnose(model, X, None, bent, optimizer=optimizer, rank=False, counterfactual=False)


def _monitored(model: nn.Module, optimizer: torch.optim.Optimizer) -> ad.Diagnosis:
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        optimizer.step()
    assert monitor.last is not None
    return monitor.last


def _by_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> ad.Diagnosis:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = bent(model(X))
        loss.backward()
        return loss

    with ad.Monitor(model, optimizer, every=1) as monitor:
        optimizer.step(closure)  # type: ignore[arg-type]
    assert monitor.last is not None
    return monitor.last


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("found", [_diagnosed, _monitored, _by_closure], ids=lambda found: found.__name__.strip("_"))
def test_a_parameter_that_is_an_input_is_told_as_it_was_before_the_step(
    name: str, found: Callable[[nn.Module, torch.optim.Optimizer], ad.Diagnosis]
) -> None:
    if name == "data" and found is _by_closure:
        pytest.skip("it asks no closure")
    torch.manual_seed(0)
    model = _Pooled().double()
    own = model.latent.detach().square().sum().item() + 1
    told = found(model, OPTIMISERS[name](model))
    projections = {f"attention.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
    assert {line.module for line in told.coverage if line.status == "measured"} == {"q"} | projections
    assert {row.module: row.self_term_median for row in told.rows if row.module in ("q", "attention.q_proj")} == {
        "q": pytest.approx(own, rel=1e-12),
        "attention.q_proj": pytest.approx(own, rel=1e-12),
    }
    assert all(check.ok for check in told.checks)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_view_of_a_weight_that_is_an_input_is_told_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    model = _Through().double()
    wanted = model.embedding.weight.detach()[1:4].square().sum(1).add(1).quantile(0.5).item()
    told = _monitored(model, OPTIMISERS[name](model))
    assert [row.self_term_median for row in told.rows] == [pytest.approx(wanted, rel=1e-12)]
    assert all(check.ok for check in told.checks if check.parameter.startswith("layer"))


def test_a_parameter_that_was_written_to_before_the_step_is_still_refused_as_an_input() -> None:
    model = _Pooled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        bent(model(X)).backward()
        with torch.no_grad():
            model.latent.mul_(2)
        optimizer.step()
    assert monitor.last is not None
    assert "its input was changed in place" in statuses(monitor.last)["q"][1]
