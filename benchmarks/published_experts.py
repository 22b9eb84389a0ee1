"""Mixture-of-experts layers and latent attention as Megatron-LM runs them, on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import expert_kernels as kernels
from benchmarks import fused_kernels as fused

__all__ = ["ExpertLayer", "Experts", "Latent", "LatentAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What a layer with experts is made of.

    Attributes:
        count: experts of the whole model in each layer.
        chosen: experts of a token.
        ffn: width between the two products of an expert, after gating.
        shared_ffn: of the expert that every token goes through; 0: there is none.
        dense_layers: first layers, which have none.
        router: dtype of the choice.
        groups, chosen_groups: experts are chosen from so many of the groups; 0: from all.
        chooses_scores: the softmax is over all experts, before the choice.
        is_padded: each expert gets as many rows as any other, some of them empty.
        has_loss: a loss beside balances the choice.
    """

    count: int
    chosen: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    router: Literal["bfloat16", "float32"] = "bfloat16"
    groups: int = 0
    chosen_groups: int = 0
    chooses_scores: bool = False
    is_padded: bool = False
    has_loss: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Widths of latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    Attributes:
        query_rank, key_rank: of what queries, and keys with values, are projected through.
        key, position, value: of a head: key without and with position apart, value.
    """

    query_rank: int
    key_rank: int
    key: int
    position: int
    value: int


class ExpertLayer(nn.Module):
    """A layer of experts: shared expert, router, rows to experts, two grouped products, back.

    Order and kernels: `MoELayer.forward`, `MoEAlltoAllTokenDispatcher` and `TEGroupedMLP`.
    """

    def __init__(self, width: int, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts.count, bias=False)
        self.up = nn.Parameter(torch.empty(experts.count, width, 2 * experts.ffn))
        self.down = nn.Parameter(torch.empty(experts.count, experts.ffn, width))
        if experts.shared_ffn:
            self.shared_up = nn.Linear(width, 2 * experts.shared_ffn, bias=False)
            self.shared_down = nn.Linear(experts.shared_ffn, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens = hidden.shape[:2]
        if self.experts.shared_ffn:
            shared = self.shared_down(fused.swiglu(self.shared_up(hidden)))
        probs = self._routed(self.router(hidden))
        rows = kernels.dispatch_rows(hidden, probs, self.experts.chosen)
        weights = kernels.row_weights(probs, self.experts.chosen)
        wide = kernels.weighted_swiglu(torch.bmm(rows, self.up), weights)
        mixed = kernels.combine_rows(torch.bmm(wide, self.down), batch, tokens)
        return mixed + shared if self.experts.shared_ffn else mixed

    def _routed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return probabilities, (batch, tokens, experts), those of what is not chosen 0.

        Operator by operator: `topk_routing_with_score_function`, `apply_router_token_dropping` and
        `compute_routing_scores_for_aux_loss`.
        """
        experts = self.experts
        if experts.router == "float32":
            logits = logits.float()
        if experts.chooses_scores:
            scores = logits.softmax(-1, dtype=torch.float32)
            places = self._chosen(scores)
            values = kernels.taken(scores, places)
        else:
            places = self._chosen(logits)
            values = kernels.taken(logits, places).softmax(-1, dtype=torch.float32)
        probs = kernels.placed(values.to(logits.dtype), places, experts.count)
        chosen = kernels.marked(places, experts.count)
        if experts.is_padded:
            probs = probs * kernels.within_capacity(probs, experts.chosen)
        if not experts.has_loss:
            return probs
        scores = logits.softmax(-1, dtype=torch.float32)
        again = kernels.marked(kernels.top_places(scores, experts.chosen), experts.count)
        return kernels.with_loss(probs, kernels.balance_loss(scores * again, chosen))

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the places of the largest scores; with groups as `group_limited_topk`."""
        experts = self.experts
        if experts.groups > 1:
            grouped = scores.view(*scores.shape[:2], experts.groups, -1)
            each = max(1, experts.chosen // experts.chosen_groups)
            best = torch.topk(grouped, each, dim=-1)[0].sum(-1)
            kept = kernels.marked(kernels.top_places(best, experts.chosen_groups), experts.groups)
            kept = kept.unsqueeze(-1).expand(grouped.shape).reshape(scores.shape)
            scores = scores.masked_fill(~kept, float("-inf"))
        return kernels.top_places(scores, experts.chosen)


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values come from narrow projections.

    Megatron-LM, `MLASelfAttention`; its rotary kernel writes keys and values of all heads.
    """

    def __init__(self, width: int, heads: int, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = heads, latent
        self.query_width = latent.key + latent.position
        self.query_down = nn.Linear(width, latent.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(latent.query_rank)
        self.query_up = nn.Linear(latent.query_rank, heads * self.query_width, bias=False)
        self.key_down = nn.Linear(width, latent.key_rank + latent.position, bias=False)
        self.key_norm = nn.RMSNorm(latent.key_rank)
        self.key_up = nn.Linear(latent.key_rank, heads * (latent.key + latent.value), bias=False)
        self.out = nn.Linear(heads * latent.value, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens = hidden.shape[:2]
        latent = self.latent
        query = self.query_up(self.query_norm(self.query_down(hidden)))
        query = fused.rotate(query.view(rows, tokens, self.heads, self.query_width))
        sizes = [latent.key_rank, latent.position]
        narrow, position = torch.split(self.key_down(hidden), sizes, dim=-1)
        both = self.key_up(self.key_norm(narrow))
        both = both.view(rows, tokens, self.heads, latent.key + latent.value)
        both = kernels.latent_keys(both, position)
        key, value = torch.split(both, [self.query_width, latent.value], dim=-1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        width = self.heads * latent.value
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))  # type: ignore[no-any-return]
