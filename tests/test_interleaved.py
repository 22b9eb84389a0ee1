"""Plans of several stages a rank: prices, memory, timeline, rules, and what cannot be run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from autoplan.cluster import Cluster, NodeGroup
from autoplan.errors import InfeasibleError, PlanError
from autoplan.estimating import Estimate, estimate
from autoplan.interleaving import dealt
from autoplan.optimizing import optimize
from autoplan.plan import Plan
from autoplan.planner import make_planner
from autoplan.search.evaluate import stage_costs
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import even_ends_of, pipeline_problem
from autoplan.stage_bytes import rank_memory
from autoplan.stage_check import check_schedule
from autoplan.training_job import TrainingJob
from autoplan.verifier import verify_plan
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.models_for_tests import LinearChain, mean_square
from tests.numerics import ROWS, build, global_batch, program_of
from tests.plans import hand_plan

CLUSTER = Cluster.parse("1x4:cpu").with_memory("1GiB", reserve_bytes=0)
BATCH = torch.randn(16, 64)


def priced(**options: Any) -> Estimate:
    model = LinearChain(width=64, depth=7)
    return estimate(model, CLUSTER, BATCH, loss_fn=mean_square, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "pp": 2, "virtual_stages": 2, "zero_stage": 3},
        {"dp": 2, "pp": 2, "virtual_stages": 4, "recompute": "full"},
        {"pp": 4, "schedule": "zero_bubble"},
        {"pp": 4, "virtual_stages": 2, "schedule": "zero_bubble"},
    ],
)
def test_a_plan_with_several_stages_a_rank_is_priced_by_rank(options: dict[str, Any]) -> None:
    plan = priced(**options).plan
    pp, chunks = options["pp"], options.get("virtual_stages", 1)
    assert (plan.num_chunks, len(plan.stages)) == (chunks, pp * chunks)
    assert len(plan.predicted.peak_memory_bytes) == len(plan.predicted.stage_time_s) == pp
    assert plan.timeline().peak_bytes() == plan.predicted.peak_memory_bytes
    assert Plan.from_json(plan.to_json()) == plan
    planner = make_planner(
        TrainingJob(LinearChain(width=64, depth=7), CLUSTER, BATCH, loss_fn=mean_square)
    )
    assert verify_plan(plan, planner.traces.exact(plan.microbatch_size), CLUSTER) == ()
    assert "on rank" in plan.report() or chunks == 1


def on_gpus(**options: Any) -> Estimate:
    """Return the price of a model whose products take longer than its messages."""
    with torch.device("meta"):
        model = LinearChain(width=8192, depth=7)
    batch = torch.empty(16384, 8192, device="meta")
    options |= {"dp": 1, "pp": 4, "microbatch_size": 2048}
    return estimate(model, "1x4:h100_sxm_80gb", batch, loss_fn=mean_square, **options)


def test_interleaving_shortens_the_step_and_needs_more_memory() -> None:
    flat, interleaved = on_gpus(), on_gpus(virtual_stages=2)
    assert interleaved.step_time_s < flat.step_time_s
    assert interleaved.plan.timeline().step_time_s < flat.plan.timeline().step_time_s
    assert max(interleaved.peak_memory_bytes) > max(flat.peak_memory_bytes)


def test_splitting_the_backward_shortens_the_step() -> None:
    flat, split = on_gpus(), on_gpus(schedule="zero_bubble")
    assert split.step_time_s < flat.step_time_s
    assert split.plan.timeline().step_time_s < flat.plan.timeline().step_time_s


def test_what_torch_cannot_split_is_priced_and_no_plan() -> None:
    for options in ({"zero_stage": 1}, {"recompute": "full"}):
        found = priced(dp=2, pp=2, schedule="zero_bubble", **options)
        assert found.step_time_s > 0
        with pytest.raises(PlanError, match="zero_bubble with FSDP or recompute"):
            _ = found.plan


def changed(plan: Plan, **values: Any) -> Plan:
    return replace(plan, **values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: changed(p, zero_stage=1), "zero_stage=1 is run by FSDP"),
        (lambda p: changed(p, mixed_precision="bfloat16"), "mixed precision is run by FSDP"),
        (lambda p: changed(p, schedule="1f1b"), "4 stages over pp=2 ranks under schedule 1f1b"),
        (lambda p: changed(p, stages=p.stages[:3]), "3 stages over pp=2 ranks"),
        (lambda p: changed(p, num_microbatches=5), "5 micro-batches do not divide into 2 rounds"),
    ],
)
def test_schedules_that_cannot_run_are_refused(
    change: Callable[[Plan], Plan], message: str
) -> None:
    options: dict[str, Any] = {"pp": 2, "num_chunks": 2, "num_microbatches": 4}
    plan = hand_plan(program_of("gpt"), "GPT", schedule="zero_bubble", **options)
    check_schedule(plan)
    with pytest.raises(PlanError, match=message):
        check_schedule(change(plan))


def _error(rank: int, plan: Plan) -> str:
    model, loss = build("gpt_tied")
    try:
        plan.parallelize(model, global_batch(ROWS), loss, device="cpu")
    except PlanError as error:
        return str(error)
    return "no error"


def test_a_weight_shared_by_two_stages_of_a_rank_is_refused_by_name() -> None:
    options: dict[str, Any] = {"pp": 2, "num_chunks": 2, "first_calls": [1, 4, 5]}
    program = program_of("gpt_tied")
    plan = hand_plan(program, "GPT", schedule="interleaved", num_microbatches=2, **options)
    *others, third, last = plan.stages
    third = replace(third, blocks=third.blocks + last.blocks)
    plan = replace(plan, stages=(*others, third, replace(last, blocks=last.blocks[:1])))
    for message in run_workers(_error, 2, plan):
        assert "tokens.weight is read by stages [0, 2" in message
        assert "two of which are on one of the 2 ranks of the pipeline" in message


@functools.cache
def searched(memory: str = "80GB", **pins: Any) -> Plan:
    """Return the fastest plan of a GPT on four GPUs without split backwards; it has no weights."""
    sizes: dict[str, Any] = {"vocab_size": 4096, "max_tokens": 1024, "width": 2048}
    config = GPTConfig(num_layers=16, num_heads=16, is_head_tied=False, **sizes)
    with torch.device("meta"):
        model = GPT(config)
    batch = batch_like(config, 16, 1024)
    cluster = Cluster.parse("1x4:h100_sxm_80gb").with_memory(memory, reserve_bytes=0)
    pins = {"dp": 1, "pp": 4, "microbatch_size": 2, "forbid": {"schedule": "zero_bubble"}, **pins}
    return optimize(model, cluster, batch, loss_fn=loss_fn, compare=False, **pins)


def test_the_search_gives_ranks_several_stages_where_that_is_faster() -> None:
    best, flat = searched(), searched(schedule="1f1b")
    assert (best.search.status, best.schedule) == ("optimal", "interleaved")
    assert (flat.schedule, len(flat.stages)) == ("1f1b", 4)
    assert best.predicted.step_time_s < flat.predicted.step_time_s
    assert searched(schedule="interleaved").predicted.step_time_s == best.predicted.step_time_s
    assert best.search.gap < 1e-6
    assert "v=" in "".join(name for name in best.search.outcomes)
    assert searched(virtual_stages=3).num_chunks == 3


def test_states_on_the_host_may_be_beside_several_stages_a_rank() -> None:
    roomy = searched(virtual_stages=1)
    need = max(roomy.predicted.peak_memory_bytes) // 2
    plan = searched(str(need), offload="optimizer")
    flat = searched(str(need), offload="optimizer", virtual_stages=1)
    assert (plan.offload, plan.schedule) == ("optimizer", "interleaved")
    assert plan.search.gap < 0.02
    assert plan.predicted.step_time_s < 0.95 * flat.predicted.step_time_s
    assert max(plan.predicted.peak_memory_bytes) <= need
    # Every parameter, its gradient and two moments lie on the host of one rank.
    ends = plan.predicted.host_bytes
    assert len(ends) == plan.mesh.pp
    assert sum(ends) == pytest.approx(sum(flat.predicted.host_bytes), rel=0.01)


def test_a_step_by_the_search_is_near_the_simulated_one() -> None:
    plan = searched(virtual_stages=2)
    assert plan.timeline().step_time_s == pytest.approx(plan.predicted.step_time_s, rel=0.05)


def test_the_stages_of_a_rank_take_nearly_the_same_time() -> None:
    plan = searched(virtual_stages=2)
    costs = plan.costs
    assert costs is not None
    for rank in range(4):
        times = [
            sum(costs.blocks[name].seconds.forward for name in costs.stages[stage].blocks)
            for stage in (rank, rank + 4)
        ]
        longest = max(costs.blocks[name].seconds.forward for name in costs.blocks)
        assert max(times) - min(times) <= longest


def test_what_blocks_keep_counts_in_the_search_as_it_does_in_the_walk() -> None:
    """By rank the linear memory is above the exact one by nearly the same at any decision."""
    config = GPTConfig(vocab_size=4096, max_tokens=1024, width=2048, num_layers=16, num_heads=16)
    with torch.device("meta"):
        model = GPT(replace(config, is_head_tied=False))
    batch = batch_like(config, 16, 1024)
    pins = {"dp": 1, "tp": 1, "pp": 4, "microbatch_size": 2, "virtual_stages": 2}
    planner = make_planner(
        TrainingJob(model, "1x4:h100_sxm_80gb", batch, loss_fn=loss_fn), pins=pins
    )
    (setting,) = (s for s in planner.settings() if s.schedule == "interleaved")
    pricer, alike = planner.pricer(2), planner.alike_run(2)
    asked = pipeline_problem(planner, setting)
    ends = even_ends_of(planner, setting, asked.counts)
    assert any(alive % 2 for alive in asked.problem.live)  # halves of micro-batches
    linear, exact = [], []
    decisions = asked.per_call[alike.calls.start]
    for index in (i for i, own in enumerate(decisions) if own.recompute.mode == "selective"):
        options = tuple(index * (call in alike.calls) for call in range(alike.num_calls))
        found = PipelineSolution(
            status="feasible", ends=ends, options=options, objective=0, bound=0
        )
        costs = stage_costs(asked.problem, ends, options)
        linear.append([cost.memory * pricer.memory_unit for cost in costs])
        stages = dealt(alike, asked.options, found, asked.counts)
        chosen = [own[option] for own, option in zip(asked.per_call, stages.options, strict=True)]
        spans = [range(start, end) for start, end in pairwise((0, *stages.ends))]
        exact.append([rank_memory(pricer, setting, r, spans, chosen).peak for r in range(4)])
    assert len(exact) > 5
    for above, walked in zip(
        np.array(linear).T - np.array(exact).T, np.array(exact).T, strict=True
    ):
        assert np.ptp(above) < 0.12 * np.ptp(walked)  # a half counted whole: 0.2


def test_ranks_of_several_stages_are_filled() -> None:
    memory = int(0.75 * max(searched(virtual_stages=4).predicted.peak_memory_bytes))
    for stages in (2, 4):
        plan = searched(str(memory), virtual_stages=stages)
        assert 0.98 * memory < max(plan.predicted.peak_memory_bytes) <= memory


def test_what_interleaving_keeps_can_rule_it_out() -> None:
    plan = searched(virtual_stages=1, recompute="none")
    room = max(plan.predicted.peak_memory_bytes)
    found = searched(str(room), recompute="none")
    assert max(found.predicted.peak_memory_bytes) <= room
    with pytest.raises(InfeasibleError):
        searched(str(room), recompute="none", schedule="interleaved")


@pytest.mark.parametrize(
    "pins",
    [{"dp_replicate": 2, "zero_stage": 3}, {"axis_order": "tp-pp-dp", "zero_stage": 1}],
)
def test_several_stages_a_rank_are_searched_beside_replicas_and_other_orders(
    pins: dict[str, Any],
) -> None:
    with torch.device("meta"):
        model = LinearChain(width=4096, depth=8)
    plan = optimize(
        model,
        "2x4:h100_sxm_80gb",
        torch.empty(16384, 4096, device="meta"),
        loss_fn=mean_square,
        virtual_stages=2,
        compare=False,
        dp=4,
        pp=2,
        microbatch_size=1024,
        **pins,
    )
    assert (plan.num_chunks, plan.search.status) == (2, "optimal")
    assert {name: getattr(plan.mesh, name, plan.zero_stage) for name in pins} == pins
    assert plan.timeline().peak_bytes() == plan.predicted.peak_memory_bytes


def test_several_stages_a_rank_are_for_devices_of_one_type_and_it_is_said() -> None:
    fast, slow = (Cluster.parse(f"1x4:{name}_sxm_80gb") for name in ("h100", "a100"))
    cluster = replace(fast, num_nodes=2, slower=(NodeGroup(num_nodes=1, device=slow.device),))
    with pytest.raises(ValueError, match="devices of one type only"):
        optimize(
            LinearChain(width=64, depth=8), cluster, BATCH, loss_fn=mean_square, virtual_stages=2
        )


def test_fewer_micro_batches_than_ranks_pass_by_gpipe() -> None:
    plan = searched(num_microbatches=2, microbatch_size=8)
    assert (plan.schedule, plan.num_microbatches, plan.mesh.pp) == ("gpipe", 2, 4)
    assert plan.timeline().peak_bytes() == plan.predicted.peak_memory_bytes
