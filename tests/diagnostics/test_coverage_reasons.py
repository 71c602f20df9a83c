# The coverage counts each parameter once, and says what is true of a layer that was not measured: tied, without gradients, in a transform.
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from diagnosis_cases import Mlp, bent, rows, sgd, statuses
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import affine_divergence as ad
from affine_divergence.diagnostics._sentences import coverage_lines

X = rows(6, 5)


def _lines(found: ad.Diagnosis) -> dict[str, tuple[str, int, int]]:
    return {line.module: (line.status, line.parameters, line.shared) for line in found.coverage}


def _counted(found: ad.Diagnosis) -> int:
    return sum(line.parameters - line.shared for line in found.coverage)


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Each parameter once


class _Tied(nn.Module):
    """An embedding and a head of one weight, which a third that is not called has too."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.unused, self.tokens, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 9, bias=bias)
        self.unused.weight = self.tokens.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.tokens(x))
        return out


TOKENS = torch.tensor([[0, 3, 8], [1, 1, 5]])


def test_a_tied_weight_counts_once_and_where_it_is_measured() -> None:
    model = _Tied(bias=True).double()
    found = ad.diagnose(model, TOKENS, None, bent, lr=0.1)
    assert _lines(found) == {"unused": ("skipped", 36, 36), "tokens": ("measured", 36, 0), "head": ("measured", 45, 36)}
    assert _counted(found) == _size(model) == 45
    assert coverage_lines(found)[0] == "Measured: 2 modules, 2 calls, which hold 100 % of the 45 parameters."


def test_a_weight_that_is_measured_in_one_of_two_is_no_missing_one() -> None:
    found = ad.diagnose(_Tied().double(), TOKENS, None, bent, lr=0.1, include="head")
    assert _lines(found) == {"unused": ("skipped", 36, 36), "tokens": ("skipped", 36, 36), "head": ("measured", 36, 0)}


def test_the_rows_of_a_packed_weight_that_two_attentions_share_count_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.MultiheadAttention(4, 2, add_bias_kv=True), nn.MultiheadAttention(4, 2)
            self.second.in_proj_weight = self.first.in_proj_weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x, x, x)[0]
            out: Tensor = self.second(x, x, x)[0]
            return out

    model = Both().double()
    found = ad.diagnose(model, rows(5, 2, 4), None, bent, lr=0.1, counterfactual=False)
    lines = _lines(found)
    assert _counted(found) == _size(model)
    assert (lines["first.q_proj"], lines["second.q_proj"]) == (("measured", 20, 0), ("measured", 20, 16))
    assert (lines["first.bias_k"], lines["first.bias_v"]) == (("skipped", 4, 0), ("skipped", 4, 0))
    assert "no measured layer applies" in statuses(found)["first.bias_k"][1]


def _bert() -> nn.Module:
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=8))


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.parametrize("make", [_bert, _gpt2])
def test_in_a_language_model_the_parameters_are_those_of_the_model(make: Callable[[], nn.Module]) -> None:
    model = make()
    tokens = torch.randint(11, (2, 6))
    found = ad.diagnose(model, {"input_ids": tokens, "labels": tokens}, lr=0.1, rank=False, counterfactual=False)
    assert _counted(found) == _size(model) == found.about["parameters"]
    assert sum(line.shared for line in found.coverage) >= 88  # the tied head


# Not called


def test_a_layer_that_is_not_called_and_whose_weight_another_has_is_not_said_to_be_used_by_a_function() -> None:
    found = ad.diagnose(_Tied().double(), TOKENS, None, bent, lr=0.1)
    assert statuses(found)["unused"] == ("skipped", "not called; tokens has the same weight, and is measured")


def test_a_tied_layer_whose_bias_a_function_uses_is_said_to_be_used_by_one() -> None:
    class Uses(_Tied):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 9)  # type: ignore[assignment]
            self.unused.weight = self.head.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.unused.bias

    assert "used by a function" in statuses(ad.diagnose(Uses().double(), TOKENS, None, bent, lr=0.1))["unused"][1]


def test_gradients_of_zeros_that_were_left_are_no_use_of_a_layer() -> None:
    model = nn.ModuleDict({"body": nn.Linear(5, 3), "spare": nn.Linear(5, 3)}).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for names in (("body", "spare"), ("body",)):
            optimizer.zero_grad(set_to_none=False)
            sum(bent(model[name](X)) for name in names).backward()
            optimizer.step()
    assert monitor.last is not None
    assert statuses(monitor.last) == {"body": ("measured", ""), "spare": ("skipped", "not called")}


# Called without gradients


class _Quiet(nn.Module):
    """Calls a layer without gradients, in a context or in a transform."""

    def __init__(self, context: Callable[[], torch.no_grad | torch.inference_mode] | None) -> None:
        super().__init__()
        self.quiet, self.head, self.attention, self.context = nn.Linear(5, 5), nn.Linear(5, 3), nn.MultiheadAttention(5, 1), context

    def forward(self, x: Tensor) -> Tensor:
        if self.context is None:
            y = torch.func.vmap(self.quiet)(x).tanh()
        else:
            with self.context():
                y = self.quiet(x) + self.attention(x, x, x)[0]
            y = y.clone()
        out: Tensor = self.head(x + y)
        return out


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_layer_that_is_called_without_gradients_is_not_said_not_to_be_called(context: Callable[[], torch.no_grad]) -> None:
    status = statuses(ad.diagnose(_Quiet(context).double(), X, None, bent, lr=0.1))
    for name in ("quiet", *(f"attention.{part}_proj" for part in ("q", "k", "v", "out"))):
        assert status[name] == ("skipped", "called without gradients only, as in torch.no_grad() or torch.inference_mode()")
    assert status["head"] == ("measured", "")


def test_a_layer_that_is_called_in_a_transform_is_said_to_be() -> None:
    status = statuses(ad.diagnose(_Quiet(None).double(), X, None, bent, lr=0.1))
    assert "called inside a transform of torch.func" in status["quiet"][1]
    assert "another use" not in status["quiet"][1]
    assert status["attention.q_proj"] == ("skipped", "not called")


def test_a_layer_that_is_called_without_gradients_and_used_by_a_function_is_said_to_be_both() -> None:
    class Both(_Quiet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + F.linear(x, self.quiet.weight))

    reason = statuses(ad.diagnose(Both(torch.no_grad).double(), X, None, bent, lr=0.1))["quiet"][1]
    assert reason.startswith("called without gradients only")
    assert reason.endswith("; the gradient of its parameters comes from another use of them")


def _evaluated(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model["body"](X)
        model["spare"](X)
    model.train()


def test_an_evaluation_between_the_steps_of_a_monitor_is_told_only_of_layers_that_nothing_else_calls() -> None:
    model = nn.ModuleDict({"body": nn.Linear(5, 3), "spare": nn.Linear(5, 3)}).double()
    optimizer = sgd(model)
    found = []
    with ad.Monitor(model, optimizer, every=1) as monitor:
        for evaluates in (False, True, False):
            optimizer.zero_grad()
            if evaluates:
                _evaluated(model)
            bent(model["body"](X)).backward()
            if evaluates:
                _evaluated(model)
            optimizer.step()
            found.append(monitor.last)
    quiet = "called without gradients only, as in torch.no_grad() or torch.inference_mode()"
    assert [statuses(one)["spare"][1] for one in found] == ["not called", quiet, "not called"]
    assert [statuses(one)["body"] for one in found] == [("measured", "")] * 3
    assert [(line.calls, line.fired) for one in found for line in one.coverage if line.module == "body"] == [(1, 1)] * 3


def test_between_logged_steps_a_call_without_gradients_leaves_no_trace() -> None:
    model = nn.ModuleDict({"body": nn.Linear(5, 3), "spare": nn.Linear(5, 3)}).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=100) as monitor:
        for _ in range(2):
            bent(model["body"](X)).backward()
            optimizer.step()
        _evaluated(model)
        assert not monitor._capture.unheard


# A gradient by another pass


def _asked_for(model: nn.Module, loss: Tensor) -> None:
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        parameter.grad = gradient


def _differentiable(model: nn.Module, loss: Tensor) -> None:
    with pytest.warns(UserWarning, match="create_graph"):
        loss.backward(create_graph=True)


PASSES = pytest.mark.parametrize(
    ("passes", "said"), [(_asked_for, ("torch.autograd.grad", "loss.backward()")), (_differentiable, ("create_graph=True", "without it"))]
)


@PASSES
def test_a_gradient_that_came_by_a_pass_that_is_not_captured_is_told_with_the_way_out(
    passes: Callable[[nn.Module, Tensor], None], said: tuple[str, ...]
) -> None:
    model = Mlp(inplace=False).double()
    optimizer = sgd(model)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        passes(model, bent(model(X)))
        optimizer.step()
        assert monitor.last is not None
        optimizer.zero_grad()
        first = statuses(monitor.last)
        bent(model(X)).backward()
        optimizer.step()
    for name in ("first", "second"):
        assert first[name][0] == "skipped"
        assert first[name][1].startswith("called, and a gradient arrived by a pass")
        assert all(word in first[name][1] for word in said)
    assert statuses(monitor.last) == {"first": ("measured", ""), "second": ("measured", "")}


def test_a_layer_whose_output_leads_nowhere_still_had_no_gradient() -> None:
    class Detached(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.first(x)
            return self.second(x[:, :1].expand(-1, 7))

    assert statuses(ad.diagnose(Detached().double(), X, None, bent))["first"][1] == "called, but no gradient arrived at its output"


# Computed from other parameters


def _normed(norm: Callable[..., nn.Module], where: str) -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(4, 2)
    if where == "out_proj":
        norm(attention.out_proj)
    else:
        norm(attention, where)
    return attention.double()


class _Attends(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


@pytest.mark.parametrize("where", ["out_proj", "in_proj_weight"])
def test_projections_of_computed_weights_are_said_to_be_parametrised_and_the_others_are_measured(where: str) -> None:
    model = _Attends(_normed(parametrizations.weight_norm, where))
    found = ad.diagnose(model, rows(5, 2, 4), None, bent, lr=0.1, counterfactual=False)
    status = statuses(found)
    computed = {f"attention.{part}_proj" for part in (["out"] if where == "out_proj" else "qkv")}
    assert {name for name, (_, reason) in status.items() if reason.startswith("parametrised")} == computed
    assert {row.module for row in found.rows} == {f"attention.{part}_proj" for part in ("q", "k", "v", "out")} - computed
    assert _counted(found) == _size(model)


@pytest.mark.parametrize("where", ["out_proj", "in_proj_weight", "linear"])
def test_a_spectral_norm_takes_no_step_more_for_a_monitor(where: str) -> None:
    # Each look at such a weight in training takes a step of its power iteration.
    if where == "linear":
        plain: nn.Module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3))).double()
    else:
        plain = _Attends(_normed(parametrizations.spectral_norm, where))
    watched = copy.deepcopy(plain)
    x = rows(5, 2, 4)
    optimizer, of_watched = sgd(plain), sgd(watched)
    with ad.Monitor(watched, of_watched, every=1):
        for model, its in ((plain, optimizer), (watched, of_watched)):
            for _ in range(3):
                its.zero_grad()
                bent(model(x)).backward()
                its.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name]), name


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_pruned_of_an_attention_is_skipped_and_counted(name: str, late: bool) -> None:
    attention = nn.MultiheadAttention(4, 2).double()
    model = _Attends(attention)
    optimizer = sgd(model)
    where, leaf = (attention.out_proj, name.removeprefix("out_proj.")) if name.startswith("out_proj") else (attention, name)
    if not late:
        prune.l1_unstructured(where, leaf, 0.5)
    with ad.Monitor(model, optimizer, every=1) as monitor:
        if late:
            prune.l1_unstructured(where, leaf, 0.5)
        bent(model(rows(5, 2, 4))).backward()
        optimizer.step()
    found = monitor.last
    assert found is not None
    status = statuses(found)
    computed = {"attention.out_proj"} if name.startswith("out_proj") else {f"attention.{part}_proj" for part in "qkv"}
    assert {one for one, (_, reason) in status.items() if reason.startswith("parametrised")} == computed
    assert {row.module for row in found.rows} == {f"attention.{part}_proj" for part in ("q", "k", "v", "out")} - computed
    assert status[f"attention.{name}_orig"][0] == "skipped"
    assert _counted(found) == _size(model) == 80
