"""A small twin of a model trains under the decisions of its plan, and equals one device."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autoplan.capturer import capture
from autoplan.dry_run_result import TwinRun
from autoplan.models import LoadedModel
from autoplan.plan import Mesh, Plan, Recompute
from autoplan.twins import compare_step, shrink, twin_degrees, twin_plan
from tests.distributed import run_workers
from tests.layouts import megatron
from tests.plans import hand_plan


def large() -> LoadedModel:
    """Return a Llama without weights whose plan is for 64 processes."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=8, attention_dropout=0.1,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.empty((1, 32), dtype=torch.int64, device="meta")
    return LoadedModel(
        model=model, batch={"input_ids": tokens, "labels": tokens}, loss_fn=None, name="llama"
    )


def _run(rank: int, plan: Plan, twin: LoadedModel) -> TwinRun:
    return compare_step(plan, twin)


def test_the_twin_of_a_large_plan_equals_one_device() -> None:
    loaded = large()
    program = capture(loaded.model, loaded.batch, microbatch_size=1)
    plan = hand_plan(
        program, "Llama", dp=2, tp=8, pp=1, zero_stage=3, layouts=megatron(program, 8),
        recompute=Recompute(mode="full"),
    )  # fmt: skip
    twin = shrink(loaded)
    small = capture(twin.model, twin.batch, microbatch_size=2)
    made = twin_plan(plan, program, small, Mesh(dp=1, tp=2, pp=1))
    blocks = [b for s in made.stages for b in s.blocks if b.fqn]
    assert len(blocks) == 4
    assert all(made.placements[b.placements].axes for b in blocks)
    assert {made.recompute[b.recompute].mode for b in blocks} == {"full"}
    for found in run_workers(_run, 2, made, twin):
        assert found.is_equal, found
        assert found.loss_error < 1e-6


def test_meshes_of_twins_split_what_the_plan_splits_on_four_processes() -> None:
    assert twin_degrees(Mesh(dp=64, tp=1, pp=4)) == [Mesh(dp=2, tp=1, pp=2)]
    assert twin_degrees(Mesh(dp=1, tp=8, pp=1)) == [Mesh(dp=1, tp=2, pp=1)]
    every = twin_degrees(Mesh(dp=64, tp=4, pp=4))
    assert every == [Mesh(dp=2, tp=2, pp=1), Mesh(dp=2, tp=1, pp=2), Mesh(dp=1, tp=2, pp=2)]


def test_a_run_is_equal_within_its_tolerance_only() -> None:
    run = TwinRun(mesh="", loss_error=1e-12, gradient_error=2e-9, worst="w", tolerance=1e-9)
    assert not run.is_equal
