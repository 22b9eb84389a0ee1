"""Small models that the tests capture; float64, no dropout unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import capture
from autoplan.program import BlockGraph

__all__ = ["MODELS", "blocks", "gpt", "gpt2", "llama"]

ROWS, TOKENS, VOCABULARY = 2, 12, 64


class Attention(nn.Module):
    """Fused qkv as one `nn.Linear`, unpacked by a view, a permutation and `unbind`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        qkv = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return out


class PlainAttention(nn.Module):
    """Attention of an einsum, a softmax and a product; qkv is unpacked by `chunk`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        mixed = scores.softmax(-1) @ v.transpose(1, 2)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        down: torch.Tensor = self.down(F.relu(self.up(self.norm2(x)), inplace=True))
        return x + down


class GPT(nn.Module):
    def __init__(self, attention: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        width = 32
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=3)
        self.blocks = nn.ModuleList(Block(width, attention(width, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(attention: Callable[[int, int], nn.Module] = Attention) -> nn.Module:
    """Return a GPT of our own."""
    return GPT(attention).double()


def llama(kv_heads: int = 4) -> nn.Module:
    """Return a small transformers Llama with 8 query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: nn.Module = LlamaForCausalLM(config).double()
    return model


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Return a small transformers GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: nn.Module = GPT2LMHeadModel(config).double()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama_one_kv_head": lambda: llama(kv_heads=1),
    "gpt2": gpt2,
    "gpt": gpt,
    "gpt_plain_attention": lambda: gpt(PlainAttention),
}


def blocks(model: nn.Module) -> dict[str, BlockGraph]:
    """Return the block graphs of a model by name: `block0`, `glue0`, `glue1`."""
    ids = torch.zeros(2 * ROWS, TOKENS, dtype=torch.long)
    batch: Any = {"labels": ids}
    batch["ids" if isinstance(model, GPT) else "input_ids"] = ids
    program = capture(model, batch, microbatch_size=ROWS)
    return {graph.name: graph for graph in program.graphs}
