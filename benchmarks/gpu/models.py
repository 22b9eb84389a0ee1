"""The two models of the GPU benchmark, with tiny versions for testing the benchmark itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.models import LoadedModel
from examples.gpt import GPT, GPTConfig, loss_fn

__all__ = ["MODELS", "Llama", "LlamaConfig", "build"]

MODELS = ("gpt2_medium", "llama_1b")

# Source: Radford et al. 2019, table 2 (345M); the vocabulary is padded to a multiple of 128.
_GPT2_MEDIUM = GPTConfig(vocab_size=50304, max_tokens=1024, num_layers=24, num_heads=16, width=1024)
_TINY_GPT = GPTConfig(vocab_size=256, max_tokens=32, num_layers=3, num_heads=2, width=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama-style model; the defaults are those of Llama 3.2 1B (Meta 2024)."""

    vocab_size: int = 128256
    tokens: int = 2048
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    width: int = 2048
    hidden: int = 8192


_TINY_LLAMA = LlamaConfig(
    vocab_size=256, tokens=32, num_layers=3, num_heads=4, num_kv_heads=2, width=32, hidden=64
)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * (x.float() * scale).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.num_heads
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, self.num_kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(config.width, self.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q = self.q(x).view(rows, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(rows, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(rows, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        repeats = self.num_heads // self.num_kv_heads
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return result


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _Norm(config.width), _Norm(config.width)
        self.attention = _Attention(config)
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        inner = self.norm2(x)
        added: torch.Tensor = x + self.down(F.silu(self.gate(inner)) * self.up(inner))
        return added


class Llama(nn.Module):
    """Rotary positions, grouped queries, RMSNorm and SwiGLU; the head is the embedding's weight."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = _Norm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.head.weight = self.embed.weight
        dim = config.width // config.num_heads
        frequency = 500000.0 ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(config.tokens), frequency)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build(name: str, rows: int, *, is_tiny: bool = False, device: str = "cpu") -> LoadedModel:
    """Return a model in bfloat16 (tiny ones: float32) with a batch of `rows` rows.

    Args:
        name: one of `MODELS`.
        rows: of the batch.
        is_tiny: the small version, for testing the benchmark on a CPU.
        device: where the weights are made; `meta` for planning.

    Raises:
        ValueError: there is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r}; there are {', '.join(MODELS)}")
    torch.manual_seed(0)
    gpt = _TINY_GPT if is_tiny else _GPT2_MEDIUM
    llama = _TINY_LLAMA if is_tiny else LlamaConfig()
    with torch.device(device):
        model: nn.Module = GPT(gpt) if name == "gpt2_medium" else Llama(llama)
    tokens, words = gpt.max_tokens, gpt.vocab_size
    if name == "llama_1b":
        tokens, words = llama.tokens, llama.vocab_size
    ids = torch.randint(0, words, (rows, tokens))
    return LoadedModel(
        model=model if is_tiny else model.to(torch.bfloat16),
        batch={"input_ids": ids},
        loss_fn=loss_fn,
        name=name,
    )
