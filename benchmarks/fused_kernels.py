"""Kernels that training frameworks fuse and plain torch does not, for tracing only.

Each has shapes and a gradient, so that a trace sees what it reads, writes and keeps for backward;
it cannot run. What they keep is what the frameworks' own kernels keep:

    masked_softmax  probabilities             Megatron-LM `fused_softmax.py`
    dropout_add     a mask of a byte          Megatron-LM `fused_bias_dropout.py`
    swiglu          gate and value, in one    Megatron-LM `fused_bias_swiglu.py`
    rotate          nothing                   rotary embedding, Transformer Engine `rope.py`
    cross_entropy   logits                    flash-attn `losses/cross_entropy.py`
    gather_rows     indices                   flash-attn `bert_padding.py`, `index_first_axis`
    scatter_rows    indices                   flash-attn `bert_padding.py`, `index_put_first_axis`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import autoplan

__all__ = [
    "cross_entropy",
    "dropout_add",
    "gather_rows",
    "kernel_for_tracing",
    "masked_softmax",
    "rotate",
    "scatter_rows",
    "shaped",
    "swiglu",
]


def _no_kernel(*_: Any) -> Any:
    raise RuntimeError("this kernel exists for tracing only")


Fake = Callable[..., Any]


def shaped(*ops: Any) -> Callable[[Fake], Fake]:
    """Decorate the function that gives the results of `ops` on fake tensors."""

    def register(fake: Fake) -> Fake:
        for op in ops:
            op.register_fake(fake)
        return fake

    return register


def kernel_for_tracing(name: str, schema: str, *tags: torch.Tag) -> Any:
    """Return an operator of the namespace `published` that has no implementation."""
    return torch.library.custom_op(
        f"published::{name}", _no_kernel, mutates_args=(), schema=schema, tags=tags
    )


_op, _shaped = kernel_for_tracing, shaped

_softmax = _op("masked_softmax", "(Tensor scores) -> Tensor")
_softmax_backward = _op("masked_softmax_backward", "(Tensor gradient, Tensor probs) -> Tensor")
_dropout_add = _op("dropout_add", "(Tensor value, Tensor residual) -> Tensor", torch.Tag.pointwise)
_dropout_add_backward = _op("dropout_add_backward", "(Tensor gradient) -> Tensor")
_swiglu = _op("swiglu", "(Tensor both) -> Tensor")
_swiglu_backward = _op("swiglu_backward", "(Tensor gradient, Tensor both) -> Tensor")
_rotate = _op("rotate", "(Tensor value) -> Tensor", torch.Tag.pointwise)
_rotate_backward = _op("rotate_backward", "(Tensor gradient) -> Tensor")
_gather = _op("gather_rows", "(Tensor value) -> Tensor", torch.Tag.pointwise)
_gather_backward = _op("gather_rows_backward", "(Tensor gradient, Tensor zeros) -> Tensor")
_scatter = _op("scatter_rows", "(Tensor value, Tensor zeros) -> Tensor", torch.Tag.pointwise)
_scatter_backward = _op("scatter_rows_backward", "(Tensor gradient) -> Tensor")
_loss = _op("cross_entropy", "(Tensor logits, Tensor labels) -> (Tensor, Tensor)")
_loss_backward = _op(
    "cross_entropy_backward", "(Tensor gradient, Tensor logits, Tensor lse) -> Tensor"
)


@_shaped(_softmax, _rotate, _gather)
def _same(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


@_shaped(_rotate_backward, _dropout_add_backward, _scatter_backward)
def _same_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


@_shaped(_softmax_backward)
def _like_gradient(gradient: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


@_shaped(_swiglu_backward)
def _like_both(gradient: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(both)


@_shaped(_dropout_add)
def _dropout_add_fake(value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


@_shaped(_gather_backward, _scatter)
def _like_first(value: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


@_shaped(_swiglu)
def _swiglu_fake(both: torch.Tensor) -> torch.Tensor:
    return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))


@_shaped(_loss)
def _loss_fake(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    return rows, torch.empty_like(rows)


@_shaped(_loss_backward)
def _loss_backward_fake(
    gradient: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(logits)


def _keep_output(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output)


def _keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    return None


def _keep_logits(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[1])


_softmax.register_autograd(
    lambda ctx, grad: _softmax_backward(grad, *ctx.saved_tensors), setup_context=_keep_output
)
_dropout_add.register_autograd(
    lambda ctx, grad: (_dropout_add_backward(grad), grad), setup_context=_keep_nothing
)
_swiglu.register_autograd(
    lambda ctx, grad: _swiglu_backward(grad, *ctx.saved_tensors), setup_context=_keep_input
)
_gather.register_autograd(
    lambda ctx, grad: _gather_backward(grad, torch.zeros_like(grad)), setup_context=_keep_nothing
)
_scatter.register_autograd(
    lambda ctx, grad: (_scatter_backward(grad), None), setup_context=_keep_nothing
)
_rotate.register_autograd(lambda ctx, grad: _rotate_backward(grad), setup_context=_keep_nothing)
_loss.register_autograd(
    lambda ctx, grad, _: (_loss_backward(grad, *ctx.saved_tensors), None),
    setup_context=_keep_logits,
)


@autoplan.register_op(
    "published::masked_softmax", shardings=[(("S(0)",), "S(0)"), (("S(1)",), "S(1)")]
)
def _no_flops(scores: torch.Tensor) -> int:
    return 0


@autoplan.register_op(
    "published::dropout_add",
    saved=lambda value, residual, result: [value.numel()],  # the mask, a byte each
)
def _no_flops_add(value: torch.Tensor, residual: torch.Tensor) -> int:
    return 0


# Each rank stores its own gate beside its own value, so a plain slice of both is what it has.
@autoplan.register_op("published::swiglu", shardings=[(("S(2)",), "S(2)"), (("S(1)",), "S(1)")])
def _no_flops_swiglu(both: torch.Tensor) -> int:
    return 0


@autoplan.register_op("published::rotate")
def _no_flops_rotate(value: torch.Tensor) -> int:
    return 0


@autoplan.register_op("published::gather_rows")
def _no_flops_gather(value: torch.Tensor) -> int:
    return 0


@autoplan.register_op("published::scatter_rows")
def _no_flops_scatter(value: torch.Tensor, zeros: torch.Tensor) -> int:
    return 0


@autoplan.register_op("published::cross_entropy")
def _no_flops_loss(logits: torch.Tensor, labels: torch.Tensor) -> int:
    return 0


def masked_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the causal softmax of scaled scores, (batch, heads, queries, keys), in one kernel."""
    return _softmax(scores)  # type: ignore[no-any-return]


def dropout_add(value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + dropout(value) in one kernel."""
    return _dropout_add(value, residual)  # type: ignore[no-any-return]


def swiglu(both: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * value of (..., 2 * width) in one kernel."""
    return _swiglu(both)  # type: ignore[no-any-return]


def rotate(value: torch.Tensor) -> torch.Tensor:
    """Return a rotary embedding of (batch, heads, tokens, width) in one kernel."""
    return _rotate(value)  # type: ignore[no-any-return]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of logits in one kernel that keeps the logits as they are."""
    return _loss(logits, labels)[0].mean()  # type: ignore[no-any-return]


def gather_rows(value: torch.Tensor) -> torch.Tensor:
    """Return the rows that are no padding, here all, in a new tensor."""
    return _gather(value)  # type: ignore[no-any-return]


def scatter_rows(value: torch.Tensor) -> torch.Tensor:
    """Return rows put back among padding, in a new tensor of zeros."""
    return _scatter(value, torch.zeros_like(value))  # type: ignore[no-any-return]
