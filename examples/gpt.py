"""A small GPT of our own, written as people write them; used by the examples and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "GPTConfig", "batch_like", "loss_fn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT; the defaults make a model of 3.4 million parameters."""

    vocab_size: int = 512
    max_tokens: int = 128
    num_layers: int = 4
    num_heads: int = 8
    width: int = 256
    is_qkv_fused: bool = True
    is_head_tied: bool = True
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention with one projection to q, k and v, or three."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        if config.is_qkv_fused:
            self.qkv = nn.Linear(config.width, 3 * config.width)
        else:
            self.q = nn.Linear(config.width, config.width)
            self.k = nn.Linear(config.width, config.width)
            self.v = nn.Linear(config.width, config.width)
        self.is_qkv_fused = config.is_qkv_fused
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        if self.is_qkv_fused:
            q, k, v = self.qkv(x).split(width, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        shape = (rows, tokens, self.num_heads, width // self.num_heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return merged


class Block(nn.Module):
    """Attention and a GELU MLP, each after a LayerNorm, each added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        added: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return added


class GPT(nn.Module):
    """Token and position embeddings, blocks, a last norm, and a head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_tokens, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        if config.is_head_tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of each next token."""
    predicted = logits[:, :-1].reshape(-1, logits.shape[-1])
    return F.cross_entropy(predicted, batch["input_ids"][:, 1:].reshape(-1))


def batch_like(config: GPTConfig, rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tokens)
    return {"input_ids": torch.randint(config.vocab_size, shape, generator=generator)}
