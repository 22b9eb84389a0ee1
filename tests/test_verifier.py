"""Each numbered rule of a plan is broken by a planted change and reported by its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from autoplan.cluster import Cluster
from autoplan.errors import PlanError
from autoplan.graph import Trace
from autoplan.optimizing import find_plan
from autoplan.plan import Layout, Plan, Recompute
from autoplan.planner import Planner
from autoplan.verifier import check_plan, verify_plan
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of
from tests.strategies import plans

CHAIN = ChainSpec(
    width=8, vocabulary=16, bodies=(BodySpec(count=2, hidden=16, has_view=True),), is_tied=True
)
CLUSTER = Cluster.parse("1x8:cpu").with_memory("1GiB", reserve_bytes=0)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return planner_of(CHAIN, CLUSTER, workload_of(8), {"pp": 2, "tp": 2, "zero_stage": 1})


@pytest.fixture(scope="module")
def plan(planner: Planner) -> Plan:
    return find_plan(planner)


@pytest.fixture(scope="module")
def trace(planner: Planner, plan: Plan) -> Trace:
    return planner.traces.exact(plan.microbatch_size)


def with_block(plan: Plan, **changes: str | int) -> Plan:
    """Return the plan with its second call changed."""
    first, *others = plan.stages
    blocks = list(first.blocks)
    blocks[1] = replace(blocks[1], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=(replace(first, blocks=tuple(blocks)), *others))


def with_axes(plan: Plan, axes: dict[str, str]) -> Plan:
    """Return the plan with other axes in every layout of `block0`."""
    layouts = {
        name: replace(layout, axes=axes) if layout.block == "block0" else layout
        for name, layout in plan.placements.items()
    }
    return replace(plan, placements=layouts)


def with_marks(plan: Plan, *names: str) -> Plan:
    marks = Recompute(mode="selective", keep=names)
    return with_block(
        replace(plan, recompute={**plan.recompute, "planted": marks}), recompute="planted"
    )


def with_peaks(plan: Plan, change: Callable[[int], int], *, also_parts: bool) -> Plan:
    """Return the plan with other predicted peaks, and with categories that follow or do not."""
    predicted = plan.predicted
    peaks = tuple(change(peak) for peak in predicted.peak_memory_bytes)
    parts = predicted.memory_by_category
    if also_parts:
        parts = tuple({"parameters": peak} for peak in peaks)
    predicted = replace(predicted, peak_memory_bytes=peaks, memory_by_category=parts)
    return replace(plan, predicted=predicted)


def moved_block(plan: Plan) -> Plan:
    """Return the plan without its last block."""
    *others, last = plan.stages
    return replace(plan, stages=(*others, replace(last, blocks=last.blocks[:-1])))


def without_second_call(plan: Plan) -> Plan:
    first, *others = plan.stages
    kept = (first.blocks[0], *first.blocks[2:])
    return replace(plan, stages=(replace(first, blocks=kept), *others))


def test_a_good_plan_breaks_no_rule(plan: Plan, trace: Trace) -> None:
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp) == (2, 2, 2)
    assert verify_plan(plan, trace, CLUSTER) == ()
    check_plan(plan, trace, CLUSTER)


PLANTED: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "another world size": ("V1", lambda p: replace(p, mesh=replace(p.mesh, dp=4))),
    "another batch": ("V2", lambda p: replace(p, global_batch_size=p.global_batch_size + 1)),
    "a call left out": ("V3", moved_block),
    "a call twice": ("V3", lambda p: with_block(p, call=0)),
    "stages swapped": ("V3", lambda p: replace(p, stages=p.stages[::-1])),
    "an empty stage": (
        "V3",
        lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], blocks=()))),
    ),
    "a stage too few": ("V3", lambda p: replace(p, stages=p.stages[:1])),
    "a block of another class": ("V4", lambda p: with_block(p, block="glue0")),
    "no such recompute entry": ("V4", lambda p: with_block(p, recompute="nothing")),
    "no such layout": ("V4", lambda p: with_block(p, placements="nothing")),
    "a layout of another class": (
        "V4",
        lambda p: with_block(p, placements=p.stages[0].blocks[0].placements),
    ),
    "a layout of no class": (
        "V4",
        lambda p: replace(p, placements={**p.placements, "x": Layout(block="x", degree=2)}),
    ),
    "a pipeline without schedule": ("V5", lambda p: replace(p, schedule="none")),
    "fewer micro-batches than stages": (
        "V5",
        lambda p: replace(p, num_microbatches=1, microbatch_size=4),
    ),
    "an axis that does not exist": ("V6", lambda p: with_axes(p, {"up": "heads"})),
    "an op that does not exist": ("V6", lambda p: with_axes(p, {"nothing": "a1"})),
    "another program": ("V7", lambda p: replace(p, fingerprint="other")),
    "a parameter in no stage": ("V8", without_second_call),
    "a shared parameter not said to be": ("V8", lambda p: replace(p, shared=())),
    "a ZeRO stage that there is not": ("V9", lambda p: replace(p, zero_stage=4)),
    "ZeRO without data parallelism": (
        "V9",
        lambda p: replace(p, mesh=replace(p.mesh, dp=1), num_microbatches=8, microbatch_size=1),
    ),
    "a mark on a view": ("V10", lambda p: with_marks(p, "view")),
    "a mark on nothing": ("V10", lambda p: with_marks(p, "nothing")),
    "categories that do not add up": (
        "V11",
        lambda p: with_peaks(p, lambda peak: peak + 1, also_parts=False),
    ),
    "more than the capacity": (
        "V11",
        lambda p: with_peaks(p, lambda peak: 2**31, also_parts=True),
    ),
    "less than what is kept": ("V12", lambda p: with_peaks(p, lambda peak: 100, also_parts=True)),
    "a stage without prediction": (
        "V11",
        lambda p: replace(
            p, predicted=replace(p.predicted, peak_memory_bytes=(), memory_by_category=())
        ),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_is_reported_by_its_rule(name: str, plan: Plan, trace: Trace) -> None:
    rule, change = PLANTED[name]
    broken = verify_plan(change(plan), trace, CLUSTER)
    assert rule in {violation.rule for violation in broken}
    with pytest.raises(PlanError, match=rf"breaks its rules:(.|\n)*{rule}: "):
        check_plan(change(plan), trace, CLUSTER)


def test_every_rule_has_a_planted_change() -> None:
    assert {rule for rule, _ in PLANTED.values()} == {f"V{i}" for i in range(1, 13)}


def test_an_axis_that_the_degree_does_not_divide_is_reported(plan: Plan, trace: Trace) -> None:
    layouts = {n: replace(x, degree=3, axes={}) for n, x in plan.placements.items()}
    tripled = replace(plan, mesh=replace(plan.mesh, tp=3), placements=layouts)
    broken = verify_plan(with_axes(tripled, {"up": "a1"}), trace, CLUSTER)
    assert any(v.rule == "V6" and "tp=3 does not divide" in v.message for v in broken)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(plan=plans())
def test_plans_round_trip_through_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
