"""Decoders from the dimensions of a published run, on the meta device in bfloat16.

Three families of kernels are told apart, because they keep different tensors and read memory a
different number of times: `megatron` (fused softmax, bias-dropout-add, SwiGLU, rotary embedding),
`torch` (what eager torch runs) and `foundry` (torch with a fused loss; attention on rows without
padding, which llm-foundry takes out and puts back in `flash_attn_fn`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import fused_kernels as fused
from benchmarks.published_experts import ExpertLayer, Experts, Latent, LatentAttention

__all__ = ["Adapter", "Decoder", "Shape", "batch_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adapters: all else is frozen (Hu et al. 2021).

    Attributes:
        rank: of each pair of matrices.
        targets: linear layers that have one: `query`, `key`, `value`, `out`, `up`, `gate`, `down`.
        dropout: on what an adapter reads.
    """

    rank: int
    targets: tuple[str, ...] = ("query", "value")
    dropout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decoder is made of.

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab, seq: dimensions; ffn is the width between the
            two products of an MLP, after gating.
        norm: `layer` or `rms`.
        position: `learned`, `rotary` or `none` (a bias inside the attention kernel).
        activation: `gelu`, `gelu_new` (its approximation by tanh, operator by operator),
            `squared_relu` or `swiglu`.
        is_tied: the head shares the embedding.
        has_bias: linear layers have one.
        dropout: on attention and on both residual branches.
        attention: `flash`, or `unfused` with materialised scores.
        skips_masked: the fused kernel leaves out what a causal mask hides.
        kernels: family, see the module.
        adapter: what alone is trained; None: everything is.
        experts: of layers that have them in place of an MLP; None: no layer has.
        latent: widths of latent attention; None: attention is as `kv_heads` says.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    norm: Literal["layer", "rms"] = "layer"
    position: Literal["learned", "rotary", "none"] = "learned"
    activation: Literal["gelu", "gelu_new", "squared_relu", "swiglu"] = "gelu"
    is_tied: bool = True
    has_bias: bool = True
    dropout: bool = False
    attention: Literal["flash", "unfused"] = "flash"
    skips_masked: bool = True
    kernels: Literal["megatron", "torch", "foundry"] = "torch"
    adapter: Adapter | None = None
    experts: Experts | None = None
    latent: Latent | None = None

    def __str__(self) -> str:
        """Return every field; adapter, experts and latent attention only where there are some."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("adapter", "experts", "latent"):
            if named[name] is None:
                del named[name]
        return " ".join(f"{name}={value}" for name, value in named.items())


def batch_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Return one row of tokens and labels on the meta device."""
    return {
        key: torch.empty((1, shape.seq), dtype=torch.int64, device="meta")
        for key in ("tokens", "labels")
    }


class _EagerRmsNorm(nn.Module):
    """The norm of Llama's own code: one kernel for each operator, statistics in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(hidden.dtype) * self.weight


class _AdaptedLinear(nn.Module):
    """A frozen linear layer beside two small trained ones."""

    def __init__(self, frozen: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        self.frozen = frozen
        self.first = nn.Linear(frozen.in_features, adapter.rank, bias=False)
        self.second = nn.Linear(adapter.rank, frozen.out_features, bias=False)
        self.dropout = adapter.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = F.dropout(x, 0.05) if self.dropout else x
        out: torch.Tensor = self.frozen(x) + 2.0 * self.second(self.first(narrow))
        return out


def _linear(shape: Shape, name: str, width: int, out: int) -> nn.Module:
    """Return a linear layer of a block, adapted if it is a target."""
    layer = nn.Linear(width, out, bias=shape.has_bias)
    if shape.adapter is None or name not in shape.adapter.targets:
        return layer
    return _AdaptedLinear(layer, shape.adapter)


def _norm(shape: Shape) -> nn.Module:
    if shape.norm == "layer":
        return nn.LayerNorm(shape.hidden)
    fused_norm = nn.RMSNorm(shape.hidden)
    return _EagerRmsNorm(shape.hidden) if shape.kernels == "torch" else fused_norm


class _Attention(nn.Module):
    """Projections in one product where the framework has them in one (Megatron-LM, MPT)."""

    mask: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.width = shape.hidden // shape.heads
        kv_width = self.width * shape.kv_heads
        self.is_fused = shape.kernels != "torch"
        if self.is_fused:
            self.all = nn.Linear(shape.hidden, shape.hidden + 2 * kv_width, bias=shape.has_bias)
        else:
            self.query = _linear(shape, "query", shape.hidden, shape.hidden)
            self.key = _linear(shape, "key", shape.hidden, kv_width)
            self.value = _linear(shape, "value", shape.hidden, kv_width)
        self.out = _linear(shape, "out", shape.hidden, shape.hidden)
        if shape.attention == "unfused" and shape.kernels != "megatron":
            # As the `bias` of `GPT2Attention` in transformers: one a layer.
            mask = torch.ones(shape.seq, shape.seq, dtype=torch.bool).tril()
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self._projected(hidden)
        if self.shape.position == "rotary":
            query, key = self._rotated(query), self._rotated(key)
        if self.shape.kernels == "foundry":
            query, key, value = (fused.gather_rows(x) for x in (query, key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = self._mixed(query, key, value)
        if self.shape.kernels == "foundry":
            mixed = fused.scatter_rows(mixed)
        return self.out(mixed.transpose(1, 2).reshape(hidden.shape))  # type: ignore[no-any-return]

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, each (batch, tokens, heads, width)."""
        rows, tokens = hidden.shape[:2]
        heads, groups = self.shape.heads, self.shape.kv_heads
        if not self.is_fused:
            return (
                self.query(hidden).view(rows, tokens, heads, self.width),
                self.key(hidden).view(rows, tokens, groups, self.width),
                self.value(hidden).view(rows, tokens, groups, self.width),
            )
        ratio = heads // groups
        grouped = self.all(hidden).view(rows, tokens, groups, (ratio + 2) * self.width)
        sizes = [ratio * self.width, self.width, self.width]
        query, key, value = grouped.split(sizes, dim=-1)
        return query.reshape(rows, tokens, heads, self.width), key, value

    def _rotated(self, value: torch.Tensor) -> torch.Tensor:
        if self.shape.kernels == "megatron":
            return fused.rotate(value)
        return fused.rotate(value.float()).to(value.dtype)

    def _mixed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.shape.attention == "flash":
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=0.1 if self.shape.dropout else 0.0,
                is_causal=self.shape.skips_masked,
                enable_gqa=self.shape.kv_heads != self.shape.heads,
            )
        scores = torch.matmul(query, key.transpose(-1, -2))
        if self.shape.kernels == "megatron":
            probs = fused.masked_softmax(scores)
        else:
            scores = torch.where(self.mask, scores / self.width**0.5, float("-inf"))
            probs = scores.softmax(-1)
        if self.shape.dropout:
            probs = F.dropout(probs, 0.1)
        return torch.matmul(probs, value)


def _gelu_new(x: torch.Tensor) -> torch.Tensor:
    """Return the activation of GPT-2 with an operator for each step (transformers, `gelu_new`)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
    return 0.5 * x * (1 + torch.tanh(inner))


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.is_fused = shape.activation == "swiglu" and shape.kernels == "megatron"
        self.up = _linear(shape, "up", shape.hidden, shape.ffn * (2 if self.is_fused else 1))
        if shape.activation == "swiglu" and not self.is_fused:
            self.gate = _linear(shape, "gate", shape.hidden, shape.ffn)
        self.down = _linear(shape, "down", shape.ffn, shape.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_fused:
            wide = fused.swiglu(self.up(hidden))
        elif self.shape.activation == "swiglu":
            wide = F.silu(self.gate(hidden)) * self.up(hidden)
        elif self.shape.activation == "squared_relu":
            wide = F.relu(self.up(hidden)) ** 2
        elif self.shape.activation == "gelu_new":
            wide = _gelu_new(self.up(hidden))
        else:
            wide = F.gelu(self.up(hidden))
        return self.down(wide)  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, shape: Shape, *, has_experts: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = _norm(shape)
        self.attention = (
            _Attention(shape)
            if shape.latent is None
            else LatentAttention(shape.hidden, shape.heads, shape.latent)
        )
        self.mlp_norm = _norm(shape)
        self.mlp = (
            ExpertLayer(shape.hidden, shape.experts)
            if has_experts and shape.experts is not None
            else _Mlp(shape)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self._added(self.attention(self.attention_norm(hidden)), hidden)
        return self._added(self.mlp(self.mlp_norm(hidden)), hidden)

    def _added(self, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not self.shape.dropout:
            return residual + value
        if self.shape.kernels == "megatron":
            return fused.dropout_add(value, residual)
        return residual + F.dropout(value, 0.1)


class Decoder(nn.Module):
    """A causal language model that returns its mean loss.

    `forward(tokens, labels)`: both (batch, seq) int64; a scalar.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        if shape.position == "learned":
            self.positions = nn.Embedding(shape.seq, shape.hidden)
        dense = shape.layers if shape.experts is None else shape.experts.dense_layers
        self.layers = nn.ModuleList(
            _Layer(shape, has_experts=index >= dense) for index in range(shape.layers)
        )
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight
        if shape.adapter is not None:
            self._freeze()

    def _freeze(self) -> None:
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, _AdaptedLinear):
                module.first.requires_grad_()
                module.second.requires_grad_()

    @classmethod
    def on_meta(cls, shape: Shape) -> Decoder:
        """Return the model on the meta device in bfloat16, in training mode."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                return cls(shape).train()
        finally:
            torch.set_default_dtype(before)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        if self.shape.position == "learned":
            places = torch.arange(tokens.shape[1], device=tokens.device)
            hidden = hidden + self.positions(places)
        if self.shape.dropout:
            hidden = F.dropout(hidden, 0.1)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        if self.shape.kernels == "foundry":
            return fused.cross_entropy(logits, labels)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
