"""Drawn models under drawn plans equal the single device; more in `benchmarks.equality_draws`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.calls import own_gradient
from benchmarks.equality_draws import Draw, draw_all, run_draws
from tests.distributed import run_workers

DRAWS = 40

CLASS_TOKEN = Draw(
    family="vit",
    dp=1,
    tp=1,
    pp=2,
    zero_stage=0,
    microbatch_size=1,
    num_microbatches=3,
    schedule="1f1b",
    layout="whole",
    recompute="mixed",
    optimizer="adamw",
    seed=2218,
)

VIEWS = replace(CLASS_TOKEN, family="views", recompute="none", num_microbatches=2)

# Each found a fault once.
FOUND = (
    # Two gradients of DTensors shared one memory.
    Draw(
        family="vit",
        dp=1,
        tp=2,
        pp=1,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=2,
        schedule="gpipe",
        layout="megatron",
        recompute="full",
        optimizer="adamw",
        seed=37,
    ),
    # The gradient of a class token was a part of the positions' gradient.
    CLASS_TOKEN,
    # The same, beside ZeRO-1, where FSDP holds the gradients of several micro-batches.
    replace(CLASS_TOKEN, dp=2, zero_stage=1),
    # A shared weight counted twice in the norm.
    Draw(
        family="t5",
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=2,
        num_microbatches=2,
        schedule="1f1b",
        layout="whole",
        recompute="mixed",
        optimizer="sgd",
        seed=9177,
    ),
    # Running statistics of other ranks and micro-batches were lost.
    Draw(
        family="convnet",
        dp=2,
        tp=1,
        pp=2,
        zero_stage=1,
        microbatch_size=2,
        num_microbatches=2,
        schedule="1f1b",
        layout="whole",
        recompute="full",
        optimizer="sgd",
        seed=603,
    ),
    # A stage held a bias of another stage beside a tied weight.
    Draw(
        family="bert",
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=2,
        schedule="1f1b",
        layout="whole",
        recompute="selective",
        optimizer="sgd",
        seed=91,
    ),
    # An in-place op wrote to a slice that was a view.
    Draw(
        family="mixtral",
        dp=1,
        tp=2,
        pp=1,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=2,
        schedule="1f1b",
        layout="random",
        recompute="mixed",
        optimizer="sgd",
        seed=7212,
    ),
    # More ranks than key-value heads.
    Draw(
        family="llama",
        dp=1,
        tp=4,
        pp=1,
        zero_stage=0,
        microbatch_size=2,
        num_microbatches=1,
        schedule="gpipe",
        layout="megatron",
        recompute="none",
        optimizer="sgd",
        seed=1,
    ),
    # A stage wrote to what entered it.
    VIEWS,
    # A split backward met a module that its stage applies three times, and a skip that stages hand
    # on, whose gradient a later micro-batch overwrote.
    Draw(
        family="repeated",
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=4,
        num_chunks=2,
        schedule="zero_bubble",
        layout="whole",
        recompute="none",
        optimizer="sgd",
        seed=65536,
    ),
    # A stage hands on position biases, which follow from parameters alone: their gradient was lost.
    Draw(
        family="t5",
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=2,
        num_chunks=2,
        schedule="zero_bubble",
        layout="whole",
        recompute="none",
        optimizer="adamw",
        seed=195,
    ),
    # A write to a view dropped the hook that gathers parameters for the backward.
    replace(VIEWS, dp=2, pp=1, zero_stage=3, schedule="gpipe", recompute="full"),
)

# Replicas of shards beside everything else, and several stages a rank.
REPLICAS = replace(
    CLASS_TOKEN, family="tied_gpt", dp=4, dp_replicate=2, zero_stage=3, pp=1, schedule="gpipe"
)
COMBINED = (
    replace(REPLICAS, tp=2, layout="megatron", num_microbatches=2, recompute="full"),
    replace(REPLICAS, pp=2, zero_stage=2, schedule="1f1b", axis_order="tp-pp-dp"),
    replace(
        REPLICAS,
        pp=2,
        schedule="interleaved",
        num_chunks=2,
        num_microbatches=4,
        axis_order="tp-pp-dp",
        offload="optimizer",
    ),
    replace(
        REPLICAS,
        dp=2,
        dp_replicate=1,
        tp=2,
        pp=2,
        zero_stage=1,
        layout="random",
        schedule="interleaved",
        num_chunks=2,
        num_microbatches=2,
    ),
)


class _Shared(torch.autograd.Function):
    """Gives two parameters gradients in one memory: the first has a part of it, or all."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.size = token.numel()
        return token.sum() + positions.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = gradient.expand(6).clone()
        return whole.view(-1)[: ctx.size], whole


def gradients_of_a_step(rank: int, size: int, is_owned: bool) -> tuple[list[float], list[float]]:
    """Return the gradients of a token and of positions after steps of three micro-batches."""
    token, positions = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(6))
    if is_owned:
        own_gradient(token)
        own_gradient(positions)
    for _ in range(2):
        token.grad = positions.grad = None
        for _ in range(3):
            _Shared.apply(token, positions).backward()  # type: ignore[no-untyped-call]
    assert token.grad is not None
    assert positions.grad is not None
    return token.grad.tolist(), positions.grad.tolist()


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("is_owned", [False, True])
def test_gradients_of_parameters_lie_apart(is_owned: bool, size: int) -> None:
    ((token, positions),) = run_workers(gradients_of_a_step, 1, size, is_owned)
    assert (token == [3.0] * size) == is_owned
    # Torch alone adds to one memory twice; should that change, the hook is not needed any more.
    assert (positions == [3.0] * 6) == is_owned


def test_drawn_plans_equal_the_single_device() -> None:
    chosen = (*FOUND, *COMBINED, *draw_all(DRAWS, seed=1))
    problems = run_draws(chosen)
    assert {str(chosen[i]): found for i, found in problems.items()} == {}
