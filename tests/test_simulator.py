"""The simulator: closed forms where they are exact, a brute force elsewhere, hand cases, laws."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.schedules import Action, schedule_actions
from autoplan.search.evaluate import pipeline_objective, stage_costs
from autoplan.search.problem import BlockOption, PipelineProblem, Run
from autoplan.simulator import Work, run_streams, simulate_actions
from autoplan.stage_costs import BlockSeconds, PlanCosts
from autoplan.timeline import PARTS, Interval, Timeline
from tests.costs_for_tests import brute_force_step, costs_of, pipelines, uniform_costs

SECONDS = BlockSeconds(forward=1.0, backward=2.0, weight_backward=1.0)


def simulated(costs: PlanCosts, name: str, pp: int, m: int, **options: Any) -> Timeline:
    num_chunks = len(costs.stages) // pp
    return simulate_actions(costs, schedule_actions(name, pp, m, num_chunks), **options)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(1, 1), (1, 5), (2, 2), (3, 7), (4, 8), (8, 16)])
@pytest.mark.parametrize("overlaps", [False, True])
def test_uniform_stages_take_the_closed_form(name: str, pp: int, m: int, overlaps: bool) -> None:
    found = simulated(uniform_costs(pp, SECONDS, overlaps=overlaps), name, pp, m)
    assert found.step_time_s == (m + pp - 1) * 3.0


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)
)
@settings(deadline=None)
def test_uniform_stages_take_what_the_search_says(
    pp: int, rounds: int, forward: int, backward: int, once: int
) -> None:
    m = pp * rounds
    option = BlockOption(forward=forward, backward=backward, once=once, kept=0, static=0, working=0)
    problem = PipelineProblem(
        runs=(Run(count=pp, options=(option,)),),
        num_microbatches=m,
        live=(1,) * pp,
        capacity=(1,) * pp,
        fixed=(0,) * pp,
        boundary=(0,) * pp,
    )
    objective = pipeline_objective(problem, stage_costs(problem, range(1, pp + 1), (0,) * pp))
    block = BlockSeconds(forward=forward, backward=backward, optimizer=once)
    assert simulated(uniform_costs(pp, block), "1f1b", pp, m).step_time_s == objective


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(num_chunks: int) -> None:
    # Narayanan et al. 2021, section 2.2.2: bubble over ideal time = (p - 1) / (v m).
    pp, m = 4, 8
    chunk = BlockSeconds(forward=1.0 / num_chunks, backward=2.0 / num_chunks)
    name = "1f1b" if num_chunks == 1 else "interleaved"
    found = simulated(uniform_costs(pp * num_chunks, chunk), name, pp, m)
    ideal = m * 3.0
    for rank in range(pp):
        parts = found.parts(rank)
        assert parts["compute"] == pytest.approx(ideal)
        assert parts["bubble"] / ideal == pytest.approx((pp - 1) / (num_chunks * m))


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_zero_bubble_leaves_the_bubble_that_its_source_derives(pp: int) -> None:
    # Qi et al. 2023, table 2: (p - 1) (T_F + T_B - T_W) with T_B the gradient of the inputs.
    block = BlockSeconds(forward=1.0, backward=2.0, weight_backward=1.0)
    found = simulated(uniform_costs(pp, block), "zero_bubble", pp, 2 * pp)
    assert found.mean_parts()["bubble"] == pytest.approx((pp - 1) * (1.0 + 1.0 - 1.0))


@st.composite
def compute_only(draw: st.DrawFn) -> tuple[str, int, int, list[BlockSeconds], int, bool]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    pp = draw(st.integers(1, 4))
    num_chunks = draw(st.integers(1, 2)) if name in ("interleaved", "zero_bubble") else 1
    blocks = []
    for _ in range(pp * num_chunks):
        weights, inputs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        forward = draw(st.integers(1, 6))
        blocks.append(
            BlockSeconds(forward=forward, backward=weights + inputs, weight_backward=weights)
        )
    m = pp * draw(st.integers(1, 3))
    return name, pp, m, blocks, draw(st.integers(0, 4)), draw(st.booleans())


@given(compute_only())
@settings(max_examples=100, derandomize=True, deadline=None)
def test_the_step_is_that_of_a_simulation_tick_by_tick(
    case: tuple[str, int, int, list[BlockSeconds], int, bool],
) -> None:
    name, pp, m, blocks, send, overlaps = case
    costs = costs_of([[block] for block in blocks], overlaps=overlaps, send_s=send)
    seconds = {}
    for stage, block in enumerate(blocks):
        seconds[stage, "F"] = int(block.forward)
        seconds[stage, "B"] = int(block.backward)
        seconds[stage, "W"] = int(block.weight_backward)
        seconds[stage, "I"] = int(block.backward - block.weight_backward)
    actions = schedule_actions(name, pp, m, len(blocks) // pp)
    expected = brute_force_step(actions, seconds, send, overlaps=overlaps)
    assert simulate_actions(costs, actions).step_time_s == expected


def on_streams(found: Timeline) -> dict[tuple[int, str], list[Interval]]:
    streams: dict[tuple[int, str], list[Interval]] = {}
    for interval in found.intervals:
        streams.setdefault((interval.rank, interval.stream), []).append(interval)
    return streams


@given(pipelines())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_a_stream_does_one_thing_at_a_time_and_parts_add_up_to_the_step(case: Any) -> None:
    costs, actions, zero = case
    found = simulate_actions(costs, actions, zero_stage=zero)
    for own in on_streams(found).values():
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(own))
    for rank in range(found.num_ranks):
        parts = found.parts(rank)
        assert set(parts) == set(PARTS)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(found.step_time_s)
        busy = found.busy_s(rank)
        for name in ("compute", "recompute", "optimizer"):
            assert parts[name] == pytest.approx(busy[name])


def test_processes_that_share_cores_take_as_long_as_their_work() -> None:
    # 4 stages of 3 s, 4 micro-batches: 12 s of work each, 9 s of waiting.
    found = simulated(uniform_costs(4, SECONDS), "1f1b", 4, 4)
    assert found.on_cores_s(4) == found.on_cores_s(64) == found.step_time_s == 21.0
    assert found.on_cores_s(2) == 24.0
    assert found.on_cores_s(4, replicas=2) == 24.0
    assert found.on_cores_s(8, replicas=2) == 21.0


@given(pipelines())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_nothing_exposed_is_what_communication_for_free_leaves(case: Any) -> None:
    costs, actions, zero = case
    free = {
        name: replace(
            block,
            seconds=replace(
                block.seconds,
                gather=0.0,
                reduce=0.0,
                forward_tensor_parallel=0.0,
                backward_tensor_parallel=0.0,
                recompute_tensor_parallel=0.0,
            ),
        )
        for name, block in costs.blocks.items()
    }
    stages = tuple(replace(stage, send_s=0.0) for stage in costs.stages)
    found = simulate_actions(replace(costs, blocks=free, stages=stages), actions, zero_stage=zero)
    parts = found.mean_parts()
    assert parts["tensor_parallel"] == parts["zero"] == parts["pipeline"] == 0.0
    assert found.step_time_s <= simulate_actions(costs, actions, zero_stage=zero).step_time_s


_SPEEDS = ("gather", "reduce", "forward_tensor_parallel", "forward", "backward", "optimizer")


@given(pipelines(), st.sampled_from(_SPEEDS))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_faster_links_or_kernels_never_slow_a_step(case: Any, what: str) -> None:
    costs, actions, zero = case
    faster = {
        name: replace(
            block, seconds=replace(block.seconds, **{what: getattr(block.seconds, what) / 2})
        )
        for name, block in costs.blocks.items()
    }
    if what == "backward":
        faster = {
            name: replace(b, seconds=replace(b.seconds, weight_backward=0.0))
            for name, b in faster.items()
        }
    slow = simulate_actions(costs, actions, zero_stage=zero).step_time_s
    assert (
        simulate_actions(replace(costs, blocks=faster), actions, zero_stage=zero).step_time_s
        <= slow
    )


@given(pipelines())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_overlap_never_slows_a_step(case: Any) -> None:
    costs, actions, zero = case
    times = [
        simulate_actions(replace(costs, overlaps=o), actions, zero_stage=zero).step_time_s
        for o in (True, False)
    ]
    assert times[0] <= times[1]


def named(found: Timeline, kind: str, name: str) -> Interval:
    return next(i for i in found.intervals if i.kind == kind and i.name == name)


def test_zero_3_gathers_one_block_ahead() -> None:
    block = BlockSeconds(forward=4.0, backward=8.0, gather=3.0, reduce=2.0)
    found = simulate_actions(
        costs_of([[block] * 3], overlaps=True), schedule_actions("none", 1, 1), zero_stage=3
    )
    # Forward: the first gather is exposed, the others run beside the block before.
    starts = [named(found, "forward", f"0F0 s0b{i}").start_s for i in range(3)]
    assert starts == [3.0, 7.0, 11.0]
    # Backward: the last block is gathered beside its own forward's end; reductions run beside.
    starts = [named(found, "backward", f"0B0 s0b{i}").start_s for i in (2, 1, 0)]
    assert starts == [15.0, 23.0, 31.0]
    parts = found.parts(0)
    assert parts["zero"] == pytest.approx(3.0 + 2.0)
    assert found.step_time_s == pytest.approx(39.0 + 2.0)
    assert found.busy_s(0)["zero"] == pytest.approx(6 * 3.0 + 3 * 2.0)


def test_a_slow_reduction_holds_up_the_backward_after_the_next() -> None:
    block = BlockSeconds(forward=1.0, backward=1.0, reduce=5.0)
    found = simulate_actions(
        costs_of([[block] * 3], overlaps=True), schedule_actions("none", 1, 1), zero_stage=2
    )
    reduced = named(found, "reduce", "reduce s0b2").end_s
    assert named(found, "backward", "0B0 s0b1").start_s == 4.0
    assert named(found, "backward", "0B0 s0b0").start_s == reduced == 9.0


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"), [(0, 0, 2), (1, 2, 2), (2, 2, 6), (3, 12, 6)]
)
def test_each_zero_stage_runs_its_own_collectives(zero: int, gathers: int, reductions: int) -> None:
    block = BlockSeconds(forward=1.0, backward=1.0, gather=1.0, reduce=1.0)
    found = simulate_actions(
        costs_of([[block] * 2]), schedule_actions("none", 1, 3), zero_stage=zero
    )
    counts = [sum(i.kind == kind for i in found.intervals) for kind in ("gather", "reduce")]
    assert counts == [gathers, reductions]


def test_work_that_waits_for_itself_is_refused() -> None:
    work = Work(label=("a",), stream="compute", kind="forward", name="a", seconds=1.0)
    with pytest.raises(ValueError, match="wait for each other at a"):
        run_streams([[replace(work, after=(("b",),)), replace(work, label=("b",), name="b")]])


@pytest.mark.parametrize(
    ("lists", "zero", "message"),
    [
        ([["0F0"]], 0, "stage 0 runs B of micro-batches \\[\\]"),
        ([["0F0", "0B0", "0B0"]], 0, "stage 0 runs B of micro-batches \\[0, 0\\]"),
        ([["0F0", "0B0", "1F0", "1B0"]], 0, "more than the 1 stages"),
        ([["0F0", "0I0", "0W0"]], 2, "zero_stage=2 with a split backward"),
        ([["0B0", "0F0"]], 0, "stage 0 runs the backward of micro-batch 0 before its forward"),
    ],
)
def test_lists_that_are_no_step_are_refused(lists: Any, zero: int, message: str) -> None:
    actions = tuple(tuple(Action.parse(text) for text in own) for own in lists)
    with pytest.raises(ValueError, match=message):
        simulate_actions(uniform_costs(1, SECONDS), actions, zero_stage=zero)
