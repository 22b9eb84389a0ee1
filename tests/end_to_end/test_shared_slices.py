"""A parameter that several calls share may lie in slices, the same for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoplan.conventions import Convention
from autoplan.frontiers import Decision
from autoplan.layout_numerics import check_plan_layouts
from autoplan.meter import StorageMeter
from autoplan.plan import Plan
from autoplan.planner import Planner
from autoplan.settings import Setting
from autoplan.training import make_optimizer
from tests.distributed import run_workers
from tests.end_to_end.planning import decided_plan, planner_of
from tests.numerics import build, check_plans, global_batch, program_of

TP = Setting(dp=1, tp=2, pp=1, zero_stage=0, microbatch_size=1, num_microbatches=2, schedule="none")
PIPELINE = replace(TP, pp=2, num_microbatches=3, schedule="1f1b")


def convention_of(planner: Planner, dim: int, *, is_sequence_parallel: bool = False) -> Convention:
    """Return the convention under which shared parameters are sliced along a dimension."""
    (found,) = (
        convention
        for convention in planner.pricer(1).conventions(2)
        if {placement for _, _, placement in convention.slices} == {f"S({dim})"}
        and convention.is_sequence_parallel == is_sequence_parallel
    )
    return found


def plans_of(
    name: str, setting: Setting, dim: int, *, is_sequence_parallel: bool = False
) -> list[tuple[str, str, Plan]]:
    """Return the plans at both ends of all frontiers."""
    world_size = setting.dp * setting.tp * setting.pp
    planner = planner_of(name, world_size, rows=setting.dp * setting.num_microbatches)
    convention = convention_of(planner, dim, is_sequence_parallel=is_sequence_parallel)
    pricer = planner.pricer(1)
    found = []
    for end in (0, -1):
        chosen: list[Decision] = [
            pricer.decisions(call.block, setting.tp, convention)[end] for call in pricer.trace.calls
        ]
        plan = decided_plan(planner, setting, chosen)
        stored = {
            text
            for layout in plan.placements.values()
            for fqn, text in layout.parameters.items()
            if fqn in plan.shared[0]
        }
        assert stored == {f"S({dim})"}
        found.append((f"{name} {setting} along {dim}, end {end}", name, plan))
    return found


def check(plans: list[tuple[str, str, Plan]]) -> None:
    """Run plans of one world size, and fail with what differs from the user's own module."""
    (world_size,) = {plan.mesh.world_size for _, _, plan in plans}
    for _, name, plan in plans:
        program_of(name, plan.microbatch_size)
    for problems in run_workers(check_plans, world_size, plans, timeout_s=150):
        assert problems == []


def test_a_tied_weight_in_slices_has_the_gradients_of_both_uses() -> None:
    plans = plans_of("gpt_tied", TP, 0) + plans_of("gpt_tied", TP, 1)[:1]
    plans += plans_of("gpt_tied", TP, 0, is_sequence_parallel=True)[:1]
    check(plans + plans_of("gpt2", TP, 0)[1:])


def test_slices_on_two_stages_and_under_zero_have_the_gradients_of_both_uses() -> None:
    plans = plans_of("gpt_tied", PIPELINE, 0)[1:] + plans_of("gpt2", PIPELINE, 1)[:1]
    for zero_stage in (0, 1, 3):
        setting = replace(TP, dp=2, zero_stage=zero_stage)
        plans += plans_of("gpt_tied", setting, zero_stage % 2)[:1]
    check(plans)


def test_slices_on_two_stages_under_zero_have_the_gradients_of_both_uses() -> None:
    settings = [replace(PIPELINE, dp=2, zero_stage=zero_stage) for zero_stage in (1, 3)]
    check([plan for setting in settings for plan in plans_of("gpt_tied", setting, 0)[:1]])


def test_layouts_of_slices_are_checked_before_they_are_used() -> None:
    ((_, _, plan), _) = plans_of("gpt_tied", TP, 0)
    checked = check_plan_layouts(plan, program_of("gpt_tied", 1))
    assert {one.block for one in checked} >= {"glue0", "glue1"}
    assert not any(one.is_wrong for one in checked)


def _peak(rank: int, plan: Plan) -> tuple[int, tuple[int, ...], float]:
    """Train two steps and evaluate.

    Returns:
        The bytes at most of this rank, the local shape of the tied weight, and by how much the
        loss in eval mode differs from that of the plain model with the same weights.
    """
    model, loss = build("gpt_tied")
    batch = global_batch(plan.global_batch_size)
    module = plan.parallelize(model, batch, loss, device="cpu")
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    weight = dict(module.named_parameters())["tokens.weight"]
    assert isinstance(weight, torch.distributed.tensor.DTensor)
    with StorageMeter() as meter:
        meter.baseline(module, optimizer)
        for _ in range(2):
            module.train_step(module.shard_batch(batch))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    plain, _ = build("gpt_tied")
    plain.load_state_dict(module.full_state())
    got = float(module.eval().eval_step(module.shard_batch(batch)))
    with torch.no_grad():
        expected = float(loss(plain.eval()(batch["input_ids"]), batch))
    return meter.peak_bytes, tuple(weight.to_local().shape), abs(got - expected)


def test_the_peak_of_a_tied_weight_in_slices_is_predicted() -> None:
    ((_, _, plan), _) = plans_of("gpt_tied", TP, 0)
    program_of("gpt_tied", 1)
    for peak, shape, off in run_workers(_peak, 2, plan):
        assert shape == (32, 32)
        assert off < 1e-9
        assert plan.predicted.tensor_peak_bytes(0) == pytest.approx(peak, rel=0.04)
