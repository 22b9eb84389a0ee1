"""Schedules that split backwards, in the search: chosen, pinned, forbidden, exhausted."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autoplan.bounds import blocks_bound, frontiers_bound, memory_bound, ops_bound
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.optimizing import find_plan, optimize
from autoplan.plan import Plan
from autoplan.planner import Planner, make_planner
from autoplan.setting_solver import relaxation_bound, solve_setting
from autoplan.settings import Setting
from autoplan.stage_check import check_schedule
from autoplan.training_job import TrainingJob
from autoplan.units import to_ticks
from autoplan.verifier import verify_plan
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.exhaustive_plans import fastest_step_s
from tests.models_for_tests import LinearChain, mean_square
from tests.numerics import build, check_plans, global_batch, program_of
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

LAWS = settings(
    derandomize=True, deadline=None, max_examples=8, phases=(Phase.explicit, Phase.generate)
)
GPUS = Cluster.parse("1x4:h100_sxm_80gb")


@functools.cache
def searched(memory: str = "80GB", layers: int = 16, rows: int = 16, **pins: Any) -> Plan:
    """Return the fastest plan of a GPT on four GPUs in a pipeline; nothing of it has weights."""
    sizes: dict[str, Any] = {"vocab_size": 4096, "max_tokens": 1024, "width": 2048}
    config = GPTConfig(num_layers=layers, num_heads=16, is_head_tied=False, **sizes)
    with torch.device("meta"):
        model = GPT(config)
    batch = batch_like(config, rows, 1024)
    cluster = GPUS.with_memory(memory, reserve_bytes=0)
    pins = {"dp": 1, "pp": 4, "microbatch_size": 2, **pins}
    if "without" in pins:
        pins["forbid"] = {"schedule": pins.pop("without")}
    return optimize(model, cluster, batch, loss_fn=loss_fn, compare=False, **pins)


def test_the_search_splits_backwards_where_that_is_faster() -> None:
    best, other = searched(), searched(without="zero_bubble")
    assert (best.schedule, best.search.status, best.search.gap) == ("zero_bubble", "optimal", 0)
    assert other.schedule == "interleaved"
    assert best.predicted.step_time_s < other.predicted.step_time_s
    assert searched(schedule="zero_bubble").predicted == best.predicted
    assert best.timeline().step_time_s == pytest.approx(best.predicted.step_time_s, rel=0.02)
    assert best.timeline().peak_bytes() == best.predicted.peak_memory_bytes
    assert Plan.from_json(best.to_json()) == best
    check_schedule(best)


@pytest.mark.parametrize("layers", [5, 14])
def test_stages_of_unequal_numbers_of_blocks_are_proven_and_near_the_simulation(
    layers: int,
) -> None:
    plan = searched(layers=layers, rows=8, virtual_stages=1)
    assert (plan.schedule, plan.search.status, plan.search.gap) == ("zero_bubble", "optimal", 0)
    simulated = plan.timeline().step_time_s
    assert simulated <= plan.predicted.step_time_s * (1 + 1e-3)
    assert simulated >= plan.predicted.step_time_s * 0.95


def test_what_a_split_keeps_is_within_the_memory_or_it_is_ruled_out() -> None:
    pins: dict[str, Any] = {"schedule": "zero_bubble", "virtual_stages": 1}
    free = searched(**pins)
    room = int(0.85 * max(free.predicted.peak_memory_bytes))
    tight = searched(str(room), **pins)
    assert max(tight.predicted.peak_memory_bytes) <= room
    assert tight.predicted.step_time_s > free.predicted.step_time_s
    with pytest.raises(InfeasibleError):
        searched(str(room // 2), **pins)


def test_why_not_a_split_is_answered() -> None:
    with torch.device("meta"):
        model = LinearChain(width=8192, depth=7)
    batch = torch.empty(16384, 8192, device="meta")
    options: dict[str, Any] = {"dp": 1, "pp": 4, "microbatch_size": 2048, "compare": False}
    plan = optimize(model, GPUS, batch, loss_fn=mean_square, **options)
    assert plan.why_not(schedule="zero_bubble").kind == "chosen"
    slower = plan.why_not(schedule="1f1b")
    assert (slower.kind, slower.plan is not None) == ("time", True)
    refused = plan.why_not(schedule="zero_bubble", recompute="full")
    assert (refused.kind, "keep everything" in refused.text) == ("rule", True)
    read = Plan.from_json(plan.to_json())
    told = read.why_not(schedule="1f1b", virtual_stages=1)
    assert (told.kind, "zero_bubble" in told.text) == ("time", False)
    assert "no setting with it obeys" in read.why_not(schedule="interleaved", dp_replicate=2).text


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"zero_stage": 1, "dp": 2}, "zero_stage=1 is run by FSDP"),
        ({"recompute": "full"}, "keep everything"),
        ({"dtype": torch.bfloat16}, "mixed precision is run by FSDP"),
    ],
)
def test_what_torch_cannot_run_beside_a_split_is_said(pins: dict[str, Any], message: str) -> None:
    dtype = pins.pop("dtype", torch.float32)
    model = LinearChain(width=64, depth=8).to(dtype)
    batch = torch.randn(16, 64, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        optimize(model, GPUS, batch, loss_fn=mean_square, schedule="zero_bubble", **pins)


def test_layers_that_are_read_again_are_not_split() -> None:
    class Again(LinearChain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = torch.relu(block(x))
            out: torch.Tensor = self.head(x)
            return out

    job = TrainingJob(Again(depth=4), GPUS, torch.randn(16, 16), loss_fn=mean_square)
    planner = make_planner(job, pins={"dp": 1, "pp": 4})
    assert "zero_bubble" not in {setting.schedule for setting in planner.settings()}
    planner.pins = {"schedule": "zero_bubble"}
    with pytest.raises(ValueError, match="reads a parameter again"):
        planner.settings()


@st.composite
def chains(draw: st.DrawFn) -> tuple[ChainSpec, int, int]:
    """Draw a chain of unlike bodies, the ranks of its pipeline and micro-batches."""
    bodies = tuple(
        BodySpec(
            count=1,
            hidden=draw(st.sampled_from((256, 1024, 4096))),
            has_norm=draw(st.booleans()),
            has_residual=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(2, 4)))
    )
    spec = ChainSpec(width=1024, vocabulary=draw(st.sampled_from((512, 8192))), bodies=bodies)
    pp = draw(st.sampled_from((2, 4)))
    return spec, pp, pp * draw(st.integers(1, 2))


@LAWS
@given(chains(), st.sampled_from((1.0, 0.9, 0.75)))
def test_the_fastest_split_is_the_one_that_exhaustive_search_finds(
    case: tuple[ChainSpec, int, int], share: float
) -> None:
    spec, pp, m = case
    assume(len(spec.bodies) + 2 >= pp)
    cluster = Cluster.parse(f"1x{pp}:v100_sxm_32gb")
    pins = {"dp": 1, "pp": pp, "virtual_stages": 1, "microbatch_size": 1}
    workload = workload_of(m)
    split = planner_of(spec, cluster, workload, {**pins, "schedule": "zero_bubble"})
    free = find_plan(split, compare=False)
    room = int(share * max(free.predicted.peak_memory_bytes))
    cluster = cluster.with_memory(room, reserve_bytes=0)
    split = planner_of(spec, cluster, workload, {**pins, "schedule": "zero_bubble"})
    best = fastest_step_s(split)
    try:
        plan = find_plan(split, compare=False)
    except InfeasibleError:
        assert best is None
        return
    assert best is not None
    assert plan.predicted.step_time_s == pytest.approx(best, rel=1e-6)
    assert plan.search.status == "optimal"
    (setting,) = split.settings()
    # Seconds of each block are rounded up to a tick before they are summed.
    assert max(bounds_of(split, setting)) <= to_ticks(best) * (1 + 1e-5)
    assert verify_plan(plan, split.traces.exact(1), cluster) == ()


def bounds_of(planner: Planner, setting: Setting) -> list[int]:
    """Return all bounds of a setting, in ticks."""
    refined = (blocks_bound, frontiers_bound, memory_bound, relaxation_bound)
    return [ops_bound(planner, setting), *(bound(planner, setting).bound for bound in refined)]


def test_no_solution_of_a_split_is_below_its_bounds() -> None:
    with torch.device("meta"):
        model = LinearChain(width=2048, depth=13)
    batch = torch.empty(4096, 2048, device="meta")
    pins = {"schedule": "zero_bubble", "microbatch_size": 256}
    planner = make_planner(TrainingJob(model, GPUS, batch, loss_fn=mean_square), pins=pins)
    found = planner.settings()
    assert {(s.pp, s.virtual_stages, s.tp) for s in found} >= {(4, 1, 1), (4, 2, 1), (2, 2, 2)}
    for setting in found:
        solution = solve_setting(planner, setting, None, 60.0)
        assert solution.status == "optimal", setting
        assert max(bounds_of(planner, setting)) <= solution.objective, setting


@settings(LAWS, max_examples=4)
@given(chains())
def test_splits_never_make_the_choice_slower(case: tuple[ChainSpec, int, int]) -> None:
    spec, pp, m = case
    cluster = Cluster.parse(f"1x{pp}:v100_sxm_32gb")
    pins = {"tp": 1, "microbatch_size": 1, "virtual_stages": 1}

    def fastest(schedule: str | None) -> float:
        named = {} if schedule is None else {"schedule": schedule}
        planner = planner_of(spec, cluster, workload_of(m), {**pins, **named})
        try:
            plan = find_plan(planner, compare=False)
        except (InfeasibleError, ValueError):
            return math.inf
        return plan.predicted.step_time_s

    assert fastest(None) <= min(fastest("1f1b"), fastest("zero_bubble")) * (1 + 1e-9)


def test_plans_that_the_search_splits_equal_the_model() -> None:
    of_four: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {"dp": 1, "pp": 4}),
        ("gpt", {"dp": 2, "pp": 2, "schedule": "zero_bubble"}),
    ]
    for world_size, cases in (
        (2, [("gpt_tied", {"pp": 2, "schedule": "zero_bubble"})]),
        (4, of_four),
    ):
        plans = []
        for name, pins in cases:
            model, loss = build(name)
            cluster = replace(GPUS, gpus_per_node=world_size)
            options: dict[str, Any] = {"loss_fn": loss, "microbatch_size": 1, "compare": False}
            plan = optimize(model, cluster, global_batch(8), **options, **pins)
            assert plan.schedule == "zero_bubble"
            program_of(name, 1)
            plans.append((f"{name} {pins}", name, plan))
        for problems in run_workers(check_plans, world_size, plans, timeout_s=150):
            assert problems == []
