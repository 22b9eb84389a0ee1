"""Blocks compiled by torch compute what they compute without, also recomputed and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from autoplan.emitter import parallelize
from autoplan.plan import Plan, Recompute
from tests.distributed import run_workers
from tests.layouts import megatron
from tests.numerics import build, global_batch, program_of
from tests.plans import hand_plan


def plan_of(name: str, **options: Any) -> Plan:
    """Return a plan of a small GPT."""
    return hand_plan(program_of(name), "GPT", **options)


def _step(plan: Plan, compiler: str | None) -> tuple[float, dict[str, torch.Tensor]]:
    model, loss = build("gpt_dropout")
    torch.manual_seed(5)
    module = parallelize(
        plan, model, global_batch(2), loss, device="cpu", timeout_s=60, compile=compiler
    )
    rows = plan.microbatch_size * plan.num_microbatches
    value = float(module.train_step(global_batch(rows)))
    return value, module.full_gradients()


def _differences(rank: int, plan: Plan) -> tuple[float, float, int]:
    """Return the largest differences of loss and gradients, and how many graphs were compiled."""
    loss, gradients = _step(plan, None)
    compiled_loss, compiled = _step(plan, "aot_eager")
    worst = max(float((compiled[n] - g).abs().max()) for n, g in gradients.items())
    return abs(loss - compiled_loss), worst, int(counters["stats"]["unique_graphs"])


def test_compiled_blocks_recompute_and_shard_as_others_do() -> None:
    plan = plan_of("gpt_dropout", dp=2, zero_stage=3, recompute=Recompute(mode="full"))
    for loss, gradient, graphs in run_workers(_differences, 2, plan, timeout_s=200):
        assert graphs >= 4  # one for each block
        assert loss < 1e-12
        assert gradient < 1e-12


def test_blocks_on_slices_are_compiled_with_their_collectives() -> None:
    layouts = megatron(program_of("gpt_dropout"), 2)
    plan = plan_of("gpt_dropout", tp=2, layouts=layouts, recompute=Recompute(mode="full"))
    for loss, gradient, graphs in run_workers(_differences, 2, plan, timeout_s=200):
        assert graphs == 4  # one for each block: no collective breaks it
        assert loss < 1e-12
        assert gradient < 1e-12


def test_what_cannot_be_compiled_is_refused_by_name() -> None:
    model, loss = build("gpt")
    with pytest.raises(ValueError, match="allowed are inductor, aot_eager"):
        parallelize(plan_of("gpt"), model, global_batch(2), loss, compile="eager")
