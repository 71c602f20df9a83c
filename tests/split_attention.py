# Attention written out with four linear layers that can be seen: what nn.MultiheadAttention does inside.
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class SplitAttention(nn.Module):
    """nn.MultiheadAttention with q_proj, k_proj, v_proj and out_proj as layers of their own, and without dropout."""

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        weights = (packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight)
        if packed._qkv_same_embed_dim:
            weights = packed.in_proj_weight.chunk(3)
        biases = [None] * 3 if packed.in_proj_bias is None else packed.in_proj_bias.chunk(3)
        learns = next(p.requires_grad for p in (packed.in_proj_weight, packed.q_proj_weight) if p is not None)
        made = []
        for weight, bias in zip(weights, biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.detach().clone(), learns)
            if bias is not None:
                layer.bias = nn.Parameter(bias.detach().clone(), packed.in_proj_bias.requires_grad)
            made.append(layer)
        self.q_proj, self.k_proj, self.v_proj = made
        self.out_proj = nn.Linear(packed.embed_dim, packed.embed_dim, bias=packed.out_proj.bias is not None, dtype=weight.dtype)
        self.out_proj.load_state_dict(packed.out_proj.state_dict())
        for name, p in packed.out_proj.named_parameters():
            self.out_proj.get_parameter(name).requires_grad_(p.requires_grad)
        self.bias_k, self.bias_v, self.zero = packed.bias_k, packed.bias_v, packed.add_zero_attn
        self.heads, self.batch_first = packed.num_heads, packed.batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        batched = query.ndim == 3
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if not batched:
            q, k, v = (t.unsqueeze(1) for t in (q, k, v))
        elif self.batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        n, e = q.shape[1:]
        if self.bias_k is not None:
            k, v = torch.cat([k, self.bias_k.expand(1, n, e)]), torch.cat([v, self.bias_v.expand(1, n, e)])
        if self.zero:
            k, v = torch.cat([k, k.new_zeros(1, n, e)]), torch.cat([v, v.new_zeros(1, n, e)])
        q, k, v = (t.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))  # (N, heads, time, e/heads)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        extra = logits.shape[-1] - key.shape[0 if not batched or not self.batch_first else 1]
        if key_padding_mask is not None:
            seen = torch.nn.functional.pad(key_padding_mask, (0, extra))[:, None, None]
            logits = logits.masked_fill(seen, -math.inf)
        if attn_mask is not None:
            added = attn_mask if attn_mask.is_floating_point() else logits.new_zeros(attn_mask.shape).masked_fill(attn_mask, -math.inf)
            logits = logits + torch.nn.functional.pad(added, (0, extra))
        weights = logits.softmax(-1)
        out = self.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))
        if not batched:
            out = out.squeeze(1)
        elif self.batch_first:
            out = out.transpose(0, 1)
        return out, weights.mean(1)


def split(model: nn.Module) -> nn.Module:
    """The model with every nn.MultiheadAttention in it written out, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, SplitAttention(module))
    return model
