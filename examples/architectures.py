# Architectures that people train, small and at random initialisation, each with a batch: what affdiv diagnose says of them.
#
#     affdiv diagnose examples/architectures.py:bert --batch examples/architectures.py:bert_batch --optimizer AdamW --lr 1e-3
#     affdiv diagnose examples/architectures.py:resnet18 --batch examples/architectures.py:resnet18_batch --loss cross_entropy --lr 0.1
#
# Text is the bytes of this repository's LICENSE, images are scikit-learn's digits. bert, gpt2, vit and llama need transformers.
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from affine_divergence.lab.data import load, make_splits

SEED = 0
WIDTH, LAYERS, HEADS = 128, 4, 4
BYTES = 256
MASK = BYTES  # one more token, which hides a byte from BERT
SEQUENCES, LENGTH = 8, 64
IMAGES, ENLARGED = 64, 16


def bert() -> nn.Module:
    """Post-norm encoder that guesses hidden bytes."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.BertConfig(
        vocab_size=BYTES + 1,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
    )
    return transformers.BertForMaskedLM(config)


def bert_batch() -> dict[str, Tensor]:
    """Sequences of which 15 % of the bytes are hidden; the loss is of those."""
    text = _text()
    hidden = torch.rand(text.shape, generator=torch.Generator().manual_seed(SEED)) < 0.15
    return {"input_ids": text.masked_fill(hidden, MASK), "labels": text.masked_fill(~hidden, -100)}


def gpt2() -> nn.Module:
    """Pre-norm decoder that guesses the next byte."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.GPT2Config(
        vocab_size=BYTES, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_batch() -> dict[str, Tensor]:
    """Sequences of bytes."""
    text = _text()
    return {"input_ids": text, "labels": text}


def llama() -> nn.Module:
    """Pre-norm decoder with RMSNorm, gated layers and no bias anywhere."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=BYTES,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


llama_batch = gpt2_batch


def vit() -> nn.Module:
    """Pre-norm encoder over patches of 2 × 2 pixels."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
    )
    return transformers.ViTForImageClassification(config)


def vit_batch() -> dict[str, Tensor]:
    """Digits of 8 × 8 pixels."""
    images, labels = _digits()
    return {"pixel_values": images, "labels": labels}


def resnet18() -> nn.Module:
    """ResNet-18 as it is written for images of 32 × 32 pixels."""
    torch.manual_seed(SEED)
    return _ResNet18()


def resnet18_batch() -> tuple[Tensor, Tensor]:
    """A few of these digits, each pixel made one of 4 × 4, in three equal channels."""
    images, labels = _digits()
    return F.interpolate(images[:ENLARGED], scale_factor=4.0).expand(-1, 3, -1, -1).contiguous(), labels[:ENLARGED]


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class _ResNet18(nn.Module):
    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(_Block(before, after, stride), _Block(after, after, 1))
            for before, after, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        )
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _text() -> Tensor:
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes()[: SEQUENCES * LENGTH]
    return torch.tensor(list(text)).reshape(SEQUENCES, LENGTH)


def _digits() -> tuple[Tensor, Tensor]:
    train = make_splits(load("digits")).train
    return train.inputs[:IMAGES].reshape(-1, 1, 8, 8).clone(), train.labels[:IMAGES].clone()
