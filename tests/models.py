"""Small models that the tests capture; float64, no dropout unless asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capturer import capture
from autoplan.program import BlockGraph, TensorMeta

__all__ = ["MODELS", "VOCABULARY", "blocks", "blocks_of", "gpt", "gpt2", "llama"]

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


class RepeatedKeys(nn.Module):
    """Grouped-query attention as stock transformers has it: expanded keys, a mask, rotations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = 2 * heads, heads, width // (2 * heads)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.size)
        self.scale = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q = self.q(x * self.scale).view(rows, tokens, self.heads, self.size).transpose(1, 2)
        kv = self.kv(x).view(rows, tokens, self.kv_heads, 2, self.size).permute(3, 0, 2, 1, 4)
        groups = self.heads // self.kv_heads
        keys, values = (self._repeat(part, groups) for part in (kv[0], kv[1]))
        turned = torch.cat((-q[..., self.size // 2 :], q[..., : self.size // 2]), dim=-1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        mixed = F.scaled_dot_product_attention(q + turned, keys, values, attn_mask=mask[None, None])
        flat = mixed.transpose(1, 2).reshape(rows * tokens, width)
        pair = torch.stack((flat, flat.sigmoid()), dim=1).sum(1)
        centred = pair - pair.mean(-1, keepdim=True)
        weight = self.out.weight.t()
        product = torch.mm(centred, weight).view(rows, tokens, width)
        return torch.where(product > 0, product, product * 0.5) + self.out.bias

    def _repeat(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        rows, kv_heads, tokens, size = x.shape
        wide = x[:, :, None].expand(rows, kv_heads, groups, tokens, size)
        return wide.reshape(rows, kv_heads * groups, tokens, size)


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
    "gpt_repeated_keys": lambda: gpt(RepeatedKeys),
    "gpt_plain_attention": lambda: gpt(PlainAttention),
}


def blocks(model: nn.Module, rows: int = ROWS) -> dict[str, BlockGraph]:
    """Return the block graphs of a model by name: `block0`, `glue0`, `glue1`.

    Casts to float32 (the norms of Llama have some) become float64, so that results can be compared
    to more digits than a float32 has.
    """
    ids = torch.zeros(2 * rows, TOKENS, dtype=torch.long)
    batch: Any = {"labels": ids}
    batch["ids" if isinstance(model, GPT) else "input_ids"] = ids
    program = capture(model, batch, microbatch_size=rows)
    return {graph.name: _widened(graph) for graph in program.graphs}


@cache
def blocks_of(name: str, rows: int = ROWS) -> dict[str, BlockGraph]:
    """Return the block graphs of the model of that name in `MODELS`, captured once."""
    return blocks(MODELS[name](), rows)


def _widened(graph: BlockGraph) -> BlockGraph:
    def widen(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def meta(old: TensorMeta | None) -> TensorMeta | None:
        return old and replace(old, dtype=widen(old.dtype))

    ops = tuple(
        replace(
            op,
            args=tuple(widen(x) for x in op.args),
            kwargs={key: widen(x) for key, x in op.kwargs.items()},
            meta=meta(op.meta),
        )
        for op in graph.ops
    )
    return replace(graph, ops=ops, input_metas=tuple(meta(m) for m in graph.input_metas))
