# Real architectures at random initialisation: every module with parameters is measured or skipped with a true reason; the checks hold.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from resnet import ResNet18
from torch import Tensor, nn
from torch.nn import functional as F

import affine_divergence as ad

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(3))


def _bert() -> tuple[nn.Module, dict[str, Tensor]]:
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=60, max_position_embeddings=16, **SIZES))
    padded = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return model, {"input_ids": TOKENS, "attention_mask": padded, "labels": TOKENS.where(padded > 0, -100)}


def _gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), {"input_ids": TOKENS, "labels": TOKENS}


def _vit() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(vocab_size=60, num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, **SIZES)
    return transformers.LlamaForCausalLM(config), {"input_ids": TOKENS, "labels": TOKENS}


def _resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    return ResNet18(width=2), {"x": torch.randn(3, 3, 32, 32)}


def _transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Transformer(16, 2, 1, 2, 24, batch_first=True)
    return model, {"src": torch.randn(2, 5, 16), "tgt": torch.randn(2, 3, 16)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "bert": _bert,
    "gpt-2": _gpt2,
    "vit": _vit,
    "llama": _llama,
    "resnet-18": _resnet,
    "transformer": _transformer,
}

# Modules that hold parameters of their own and no layer that is measured: how many, by type, and a word of the reason.
SKIPPED: dict[str, dict[str, tuple[int, str]]] = {
    "bert": {"LayerNorm": (6, "normaliser"), "BertLMPredictionHead": (1, "holds parameters")},
    "gpt-2": {"LayerNorm": (5, "normaliser")},
    "vit": {"LayerNorm": (5, "normaliser"), "ViTEmbeddings": (1, "holds parameters")},
    "llama": {"LlamaRMSNorm": (5, "normaliser")},
    "resnet-18": {"BatchNorm2d": (20, "normaliser")},
    "transformer": {"LayerNorm": (10, "normaliser")},
}
LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding, transformers.pytorch_utils.Conv1D)


def _layers(model: nn.Module) -> set[str]:
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            names |= {f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
        elif isinstance(module, LAYERS):
            names.add(name)
    return names


def _attentions(model: nn.Module) -> set[str]:
    """Those that are measured by their projections."""
    return {name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}


def _squares(output: Any) -> Tensor:
    return F.mse_loss(output, torch.full_like(output, 0.3))


def _given(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_module_with_parameters_is_measured_or_skipped_with_a_true_reason(name: str) -> None:
    model, batch = MODELS[name]()
    model.double()
    loss_fn = None if "labels" in batch else _squares
    found = ad.diagnose(model, _given(batch), loss_fn=loss_fn, lr=0.01, rank=False, counterfactual=False)
    measured = [line for line in found.coverage if line.status == "measured"]
    assert {row.module for row in found.rows} == _layers(model)
    assert all(line.calls == line.fired >= 1 and line.reason == "" for line in measured)
    skipped = [line for line in found.coverage if line.status == "skipped"]
    wanted = SKIPPED[name]
    assert Counter(line.type for line in skipped) == {kind: number for kind, (number, _) in wanted.items()}
    for line in skipped:
        assert wanted[line.type][1] in line.reason
    holders = {module for module, part in model.named_modules() if any(True for _ in part.parameters(recurse=False))}
    assert {line.module for line in found.coverage} >= holders - _attentions(model)
    assert all(check.ok and check.error < 1e-9 and check.reason == "" for check in found.checks), found.checks
    parts = [model.get_submodule(part) for part in holders & (_layers(model) | _attentions(model))]
    learning = {p for part in parts for p in part.parameters(recurse=False)}
    assert {check.parameter for check in found.checks} == {name for name, p in model.named_parameters() if p in learning}
