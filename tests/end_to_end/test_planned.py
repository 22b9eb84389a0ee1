"""Every plan that the planner makes runs, and equals the user's own module on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoplan.block_options import may_keep
from autoplan.conventions import WHOLE, Convention
from autoplan.errors import PlanError
from autoplan.frontiers import Decision
from autoplan.layout_check import check_layouts
from autoplan.local import axis_option
from autoplan.plan import Plan, Recompute
from autoplan.planner import Planner
from autoplan.settings import Setting
from autoplan.sharding import shard_options
from tests.distributed import run_workers
from tests.end_to_end.planning import decided_plan, planned, planner_of
from tests.layouts import megatron, random_axes
from tests.numerics import GRADIENT_TOLERANCE, check_plans, program_of

TP = Setting(dp=1, tp=2, pp=1, zero_stage=0, microbatch_size=1, num_microbatches=2, schedule="none")
MOST_POINTS = 8


def check(plans: list[tuple[str, str, Plan]], tolerance: float = GRADIENT_TOLERANCE) -> None:
    """Run plans of one world size on forked workers and fail with what does not agree."""
    (world_size,) = {plan.mesh.world_size for _, _, plan in plans}
    for _, name, plan in plans:
        program_of(name, plan.microbatch_size)
    for problems in run_workers(check_plans, world_size, plans, tolerance, timeout_s=150):
        assert problems == []


def modes(plan: Plan) -> set[str]:
    """Return the recompute modes that blocks of the plan use."""
    return {plan.recompute[b.recompute].mode for stage in plan.stages for b in stage.blocks}


PINNED: list[tuple[str, dict[str, Any]]] = [
    ("gpt_tied", {"dp": 2, "zero_stage": 0}),
    ("llama", {"dp": 2, "zero_stage": 1, "microbatch_size": 1}),
    ("gpt2", {"dp": 2, "zero_stage": 2, "microbatch_size": 1}),
    ("gpt", {"dp": 2, "zero_stage": 3, "recompute": "selective"}),
    ("gpt_tied", {"tp": 2, "recompute": "full"}),
    ("gpt_split", {"tp": 2, "recompute": "selective"}),
    ("gpt2", {"pp": 2, "recompute": "none"}),
    ("gpt_tied", {"pp": 2, "recompute": "selective"}),
]


def test_pinned_plans_for_two_processes_equal_the_model() -> None:
    plans = []
    for name, pins in PINNED:
        plan = planned(name, 2, rows=4, **{"microbatch_size": 1, **pins})
        for key, value in pins.items():
            if key == "recompute":
                assert modes(plan) <= {value, "none"}
            else:
                assert getattr(plan.mesh if key in ("dp", "tp", "pp") else plan, key) == value
        plans.append((f"{name} {pins}", name, plan))
    check(plans)


def test_pinned_plans_for_four_processes_equal_the_model() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {"dp": 2, "tp": 2, "zero_stage": 3}),
        ("llama", {"dp": 2, "tp": 2, "zero_stage": 1}),
        ("gpt2", {"pp": 2, "tp": 2, "recompute": "selective"}),
        ("gpt_tied", {"pp": 2, "dp": 2, "zero_stage": 2}),
        ("gpt_split", {"tp": 4, "microbatch_size": 2}),
    ]
    plans = []
    for name, pins in cases:
        plan = planned(name, 4, rows=4, **{"microbatch_size": 1, **pins})
        plans.append((f"{name} {pins}", name, plan))
    check(plans)


def test_three_dimensional_plans_equal_the_model() -> None:
    mesh = {"dp": 2, "tp": 2, "pp": 2, "microbatch_size": 1}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {**mesh, "zero_stage": 1}),
        ("gpt_tied", {**mesh, "zero_stage": 3, "recompute": "selective"}),
        ("llama", {**mesh, "zero_stage": 3}),
    ]
    check([(f"{n} {pins}", n, planned(n, 8, rows=4, **pins)) for n, pins in cases])


@pytest.mark.parametrize("name", ["gpt", "gpt_tied"])
def test_plans_that_memory_forces_to_combine_equal_the_model(name: str) -> None:
    """Device_Memory is below what data parallel training needs when it recomputes everything."""
    pins: dict[str, Any] = {"dp": 4, "zero_stage": 0, "recompute": "full"}
    replicated = planned(name, 4, rows=8, memory="1GiB", **pins)
    memory = str(int(0.8 * max(replicated.predicted.peak_memory_bytes)))
    plan = planned(name, 4, rows=8, memory=memory)
    assert plan.mesh.dp < 4 or plan.zero_stage > 0
    check([(f"{name} {plan.mesh} {plan.zero_stage}", name, plan)])


def frontier_plans(
    name: str, setting: Setting, planner: Planner, convention: Convention = WHOLE
) -> list[tuple[str, str, Plan]]:
    """Return plans that go from one end of every block class's frontier to the other."""
    pricer = planner.pricer(setting.microbatch_size)
    points = [pricer.decisions(b, setting.tp, convention) for b in range(len(pricer.trace.blocks))]
    blocks = [call.block for call in pricer.trace.calls]
    most = min(MOST_POINTS, max(map(len, points)))
    plans = []
    for turn in range(most):
        chosen = [points[b][turn * (len(points[b]) - 1) // max(most - 1, 1)] for b in blocks]
        keys = dict.fromkeys(decision.key for decision in chosen)
        what = f"{name}, point {turn}: {'; '.join(map(str, keys))}"
        plans.append((what, name, decided_plan(planner, setting, chosen)))
    return plans


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_a_frontier_from_end_to_end_equals_the_model(name: str) -> None:
    check(frontier_plans(name, TP, planner_of(name, 2, rows=2)))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_slices_of_tokens_that_cross_blocks_and_stages_equal_the_model(name: str) -> None:
    setting = replace(TP, dp=1, pp=2, num_microbatches=2, schedule="1f1b")
    planner = planner_of(name, 4, rows=2)
    plans = frontier_plans(name, setting, planner, Convention(is_sequence_parallel=True))
    assert all(plan.slices == setting.tp for _, _, plan in plans)
    check(plans)


def marked_plans(name: str, planner: Planner, seeds: range) -> list[tuple[str, str, Plan]]:
    """Return plans of random axes in which every result is kept that may be."""
    pricer = planner.pricer(1)
    program = program_of(name, 1)
    plans = []
    for seed in seeds:
        by_block = {}
        for index, block in enumerate(pricer.trace.blocks):
            graph = next(g for g in program.graphs if g.name == block.name)
            axes = random_axes(graph, shard_options(graph), TP.tp, seed)
            keep = tuple(op.name for op in block.ops if may_keep(op, axis_option(op, axes)))
            recompute = Recompute(mode="selective" if keep else "full", keep=keep)
            by_block[index] = Decision(axes=axes, recompute=recompute)
        chosen = [by_block[call.block] for call in pricer.trace.calls]
        plans.append((f"{name}, seed {seed}", name, decided_plan(planner, TP, chosen)))
    return plans


def test_every_legal_mark_on_random_layouts_gives_the_same_gradients() -> None:
    plans = []
    for name in ("gpt_split", "gpt2"):
        plans += marked_plans(name, planner_of(name, 2, rows=2), range(2))
    check(plans)


def test_marks_on_random_layouts_of_a_llama_differ_by_float32_noise_only() -> None:
    """Its norms compute in float32, and sum in another order where features are sliced."""
    check(marked_plans("llama", planner_of("llama", 2, rows=2), range(2)), tolerance=1e-5)


def test_a_plan_that_stores_a_parameter_in_another_way_is_refused() -> None:
    planner = planner_of("gpt", 2, rows=2)
    program = program_of("gpt", 1)
    axes = megatron(program, 2)["block0"].axes
    calls = planner.trace(1).calls
    decisions = [Decision(axes=axes if call.fqn.startswith("blocks.") else {}) for call in calls]
    plan = decided_plan(planner, TP, decisions)
    check_layouts(plan, program)
    name, layout = next((n, x) for n, x in plan.placements.items() if x.block == "block0")
    assert layout.parameters["up.weight"] == "S(0)"
    layouts = [
        (replace(layout, parameters={**layout.parameters, "up.weight": "S(1)"}), "stores it as"),
        (replace(layout, axes={**layout.axes, "v99": "heads"}), "no op v99"),
        (replace(layout, degree=4), "is for tp=4 and the plan has tp=2"),
    ]
    for wrong, message in layouts:
        with pytest.raises(PlanError, match=message):
            check_layouts(replace(plan, placements={**plan.placements, name: wrong}), program)
