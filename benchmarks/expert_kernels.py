"""Kernels of Megatron-LM's mixture-of-experts layers and latent attention, for tracing only.

As in `fused_kernels`: shapes, a gradient, and what is kept for backward; they cannot run.

    top_places, taken, placed, marked    places of what is chosen    topk, gather, scatter
    within_capacity   nothing, it is bool      `apply_router_token_dropping`, `moe_utils.py`
    balance_loss      nothing of its own       `switch_load_balancing_loss_func`, `moe_utils.py`
    with_loss         the loss                 `MoEAuxLossAutoScaler`, `moe_utils.py`
    dispatch_rows     the map of rows          TE `permutation.py`, `moe_permute_with_probs`
    row_weights       nothing                  the same kernel
    weighted_swiglu   gate, value, weights     `fused_bias_swiglu.py`, `WeightedSwiGLUFunction`
    combine_rows      the map of rows          TE `permutation.py`, `moe_unpermute`
    latent_keys       nothing                  `fused_mla_yarn_rope_apply.py`

Rows are (experts, rows of each, features): routing is balanced, or padded to it.
"""

from __future__ import annotations

from typing import Any

import torch

import autoplan
from benchmarks.fused_kernels import kernel_for_tracing, shaped

__all__ = [
    "balance_loss",
    "combine_rows",
    "dispatch_rows",
    "latent_keys",
    "marked",
    "placed",
    "row_weights",
    "rows_of_expert",
    "taken",
    "top_places",
    "weighted_swiglu",
    "with_loss",
    "within_capacity",
]

_top = kernel_for_tracing("top_places", "(Tensor scores, int chosen) -> Tensor")
_marked = kernel_for_tracing("marked", "(Tensor places, int count) -> Tensor")
_taken = kernel_for_tracing("taken", "(Tensor scores, Tensor places) -> Tensor")
_taken_backward = kernel_for_tracing(
    "taken_backward", "(Tensor gradient, Tensor places, int count) -> Tensor"
)
_placed = kernel_for_tracing("placed", "(Tensor values, Tensor places, int count) -> Tensor")
_placed_backward = kernel_for_tracing(
    "placed_backward", "(Tensor gradient, Tensor places) -> Tensor"
)
_capacity = kernel_for_tracing("within_capacity", "(Tensor probs, int chosen) -> Tensor")
_balance = kernel_for_tracing("balance_loss", "(Tensor scores, Tensor marks) -> Tensor")
_balance_backward = kernel_for_tracing(
    "balance_loss_backward", "(Tensor gradient, Tensor marks, int[] sizes) -> Tensor"
)
_loss = kernel_for_tracing("with_loss", "(Tensor probs, Tensor loss) -> Tensor")
_loss_backward = kernel_for_tracing("with_loss_backward", "(Tensor loss) -> Tensor")
_dispatch = kernel_for_tracing(
    "dispatch_rows", "(Tensor hidden, Tensor probs, int chosen) -> Tensor"
)
_dispatch_backward = kernel_for_tracing(
    "dispatch_rows_backward", "(Tensor gradient, int batch, int tokens) -> Tensor"
)
_weights = kernel_for_tracing("row_weights", "(Tensor probs, int chosen) -> Tensor")
_weights_backward = kernel_for_tracing(
    "row_weights_backward", "(Tensor gradient, int batch, int tokens) -> Tensor"
)
_swiglu = kernel_for_tracing("weighted_swiglu", "(Tensor both, Tensor weights) -> Tensor")
_swiglu_backward = kernel_for_tracing(
    "weighted_swiglu_backward",
    "(Tensor gradient, Tensor both, Tensor weights) -> (Tensor, Tensor)",
)
_combine = kernel_for_tracing("combine_rows", "(Tensor rows, int batch, int tokens) -> Tensor")
_combine_backward = kernel_for_tracing(
    "combine_rows_backward", "(Tensor gradient, int experts, int each) -> Tensor"
)
_keys = kernel_for_tracing("latent_keys", "(Tensor both, Tensor position) -> Tensor")
_keys_backward = kernel_for_tracing(
    "latent_keys_backward", "(Tensor gradient, int width) -> (Tensor, Tensor)"
)


def rows_of_expert(tokens: int, chosen: int, experts: int) -> int:
    """Return the rows that an expert gets of so many tokens: as many as any other, rounded up."""
    return -(-tokens * chosen // experts)


@shaped(_top)
def _top_fake(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:-1], chosen), dtype=torch.int64)


@shaped(_marked)
def _marked_fake(places: torch.Tensor, count: int) -> torch.Tensor:
    return places.new_empty((*places.shape[:-1], count), dtype=torch.bool)


@shaped(_taken, _placed_backward)
def _taken_fake(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return scores.new_empty(places.shape)


@shaped(_placed, _taken_backward)
def _placed_fake(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_empty((*values.shape[:-1], count))


@shaped(_capacity)
def _capacity_fake(probs: torch.Tensor, chosen: int) -> torch.Tensor:
    return torch.empty_like(probs, dtype=torch.bool)


@shaped(_balance)
def _balance_fake(scores: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    return scores.new_empty(())


@shaped(_balance_backward)
def _balance_backward_fake(
    gradient: torch.Tensor, marks: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    return gradient.new_empty(sizes)


@shaped(_loss)
def _loss_fake(probs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(probs)


@shaped(_loss_backward)
def _loss_backward_fake(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(loss)


@shaped(_dispatch)
def _dispatch_fake(hidden: torch.Tensor, probs: torch.Tensor, chosen: int) -> torch.Tensor:
    batch, tokens, width = hidden.shape
    experts = probs.shape[-1]
    each = rows_of_expert(batch * tokens, chosen, experts)
    return hidden.new_empty((experts, each, width))


@shaped(_dispatch_backward)
def _dispatch_backward_fake(gradient: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    return gradient.new_empty((batch, tokens, gradient.shape[-1]))


@shaped(_weights)
def _weights_fake(probs: torch.Tensor, chosen: int) -> torch.Tensor:
    batch, tokens, experts = probs.shape
    return probs.new_empty((experts, rows_of_expert(batch * tokens, chosen, experts), 1))


@shaped(_weights_backward)
def _weights_backward_fake(gradient: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    return gradient.new_empty((batch, tokens, gradient.shape[0]))


@shaped(_swiglu)
def _swiglu_fake(both: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))


@shaped(_swiglu_backward)
def _swiglu_backward_fake(
    gradient: torch.Tensor, both: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(both), torch.empty_like(weights)


@shaped(_combine)
def _combine_fake(rows: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    return rows.new_empty((batch, tokens, rows.shape[-1]))


@shaped(_combine_backward)
def _combine_backward_fake(gradient: torch.Tensor, experts: int, each: int) -> torch.Tensor:
    return gradient.new_empty((experts, each, gradient.shape[-1]))


@shaped(_keys)
def _keys_fake(both: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return both.new_empty((*both.shape[:-1], both.shape[-1] + position.shape[-1]))


@shaped(_keys_backward)
def _keys_backward_fake(gradient: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    lead = gradient.shape[:2]
    both = gradient.new_empty((*gradient.shape[:-1], gradient.shape[-1] - width))
    return both, gradient.new_empty((*lead, width))


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _keep_sizes(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.sizes = inputs[0].shape[:2]


def _keep_width(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.width = inputs[1].shape[-1]


def _keep_places(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.count = inputs[0].shape[-1]
    ctx.save_for_backward(inputs[1])


def _keep_marks(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.sizes = list(inputs[0].shape)
    ctx.save_for_backward(inputs[1])


def _keep_last(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[-1])


_taken.register_autograd(
    lambda ctx, grad: (_taken_backward(grad, *ctx.saved_tensors, ctx.count), None),
    setup_context=_keep_places,
)
_placed.register_autograd(
    lambda ctx, grad: (_placed_backward(grad, *ctx.saved_tensors), None, None),
    setup_context=_keep_places,
)
_balance.register_autograd(
    lambda ctx, grad: (_balance_backward(grad, *ctx.saved_tensors, ctx.sizes), None),
    setup_context=_keep_marks,
)
_loss.register_autograd(
    lambda ctx, grad: (grad, _loss_backward(*ctx.saved_tensors)), setup_context=_keep_last
)
_dispatch.register_autograd(
    lambda ctx, grad: (_dispatch_backward(grad, *ctx.sizes), None, None), setup_context=_keep_sizes
)
_weights.register_autograd(
    lambda ctx, grad: (_weights_backward(grad, *ctx.sizes), None), setup_context=_keep_sizes
)
_swiglu.register_autograd(
    lambda ctx, grad: _swiglu_backward(grad, *ctx.saved_tensors), setup_context=_keep_swiglu
)
_combine.register_autograd(
    lambda ctx, grad: (_combine_backward(grad, *ctx.sizes), None, None), setup_context=_keep_sizes
)
_keys.register_autograd(
    lambda ctx, grad: _keys_backward(grad, ctx.width), setup_context=_keep_width
)


def _law(name: str, **told: Any) -> None:
    """Tell that a kernel does no products, and what else is known of it."""

    def no_flops(*_: Any) -> int:
        return 0

    autoplan.register_op(f"published::{name}", **told)(no_flops)


_TOKENS = "S(1)"  # tokens of (batch, tokens, features), rows of (experts, rows, features)


_law("top_places", shardings=[((_TOKENS,), _TOKENS)])
_law("marked", shardings=[((_TOKENS,), _TOKENS)])
_law("taken", shardings=[((_TOKENS, _TOKENS), _TOKENS)])
_law("placed", shardings=[((_TOKENS, _TOKENS), _TOKENS)])
_law("within_capacity", shardings=[((_TOKENS,), _TOKENS)])
_law("balance_loss", shardings=[((_TOKENS, _TOKENS), "P")])
_law("with_loss", shardings=[((_TOKENS, "R"), _TOKENS)])
_law(
    "dispatch_rows",
    # int32, two per expert and token and one more (TE 2.1 and later, `row_id_map`).
    saved=lambda hidden, probs, chosen, rows: [
        4 * (probs.numel() // probs.shape[-1]) * (2 * probs.shape[-1] + 1)
    ],
    shardings=[((_TOKENS, _TOKENS), _TOKENS)],
)
_law("row_weights", shardings=[((_TOKENS,), _TOKENS)])
_law(
    "weighted_swiglu",
    shardings=[((_TOKENS, _TOKENS), _TOKENS), (("S(2)", "R*"), "S(2)")],
)
_law("combine_rows", shardings=[((_TOKENS,), _TOKENS)])
_law("latent_keys", shardings=[(("S(2)", "R*"), "S(2)"), ((_TOKENS, _TOKENS), _TOKENS)])


def top_places(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the places of the largest of (..., count), int64 (..., chosen)."""
    return _top(scores, chosen)  # type: ignore[no-any-return]


def marked(places: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool (..., count): which places are among these."""
    return _marked(places, count)  # type: ignore[no-any-return]


def taken(scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the scores at places, (..., chosen)."""
    return _taken(scores, places)  # type: ignore[no-any-return]


def placed(values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Return (..., count) with values at places and 0 elsewhere."""
    return _placed(values, places, count)  # type: ignore[no-any-return]


def within_capacity(probs: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return bool (batch, tokens, experts): the rows that each expert takes of a rank's tokens."""
    return _capacity(probs, chosen)  # type: ignore[no-any-return]


def balance_loss(scores: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Return a scalar from scores and choices, both (batch, tokens, experts)."""
    return _balance(scores, marks)  # type: ignore[no-any-return]


def with_loss(probs: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return probabilities whose backward adds the gradient of a loss beside (a scalar)."""
    return _loss(probs, loss)  # type: ignore[no-any-return]


def dispatch_rows(hidden: torch.Tensor, probs: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return (experts, rows, width): each of (batch, tokens, width) once for each choice."""
    return _dispatch(hidden, probs, chosen)  # type: ignore[no-any-return]


def row_weights(probs: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return the probability of each row, (experts, rows, 1)."""
    return _weights(probs, chosen)  # type: ignore[no-any-return]


def weighted_swiglu(both: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * value * weights of (..., 2 * width) in one kernel."""
    return _swiglu(both, weights)  # type: ignore[no-any-return]


def combine_rows(rows: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return (batch, tokens, width): the sum of a token's rows."""
    return _combine(rows, batch, tokens)  # type: ignore[no-any-return]


def latent_keys(both: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return keys and values, one after the other, of all heads.

    Args:
        both: (batch, tokens, heads, key width without position + value width).
        position: (batch, tokens, width), rotated and the same for every head.
    """
    return _keys(both, position)  # type: ignore[no-any-return]
