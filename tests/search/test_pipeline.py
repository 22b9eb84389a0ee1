"""Level 2: the search equals exhaustive search, the laws of its answers, and known cuts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoplan.search.columns import KnownStages
from autoplan.search.counting import solve_by_counting
from autoplan.search.evaluate import cut_positions, pipeline_objective, stage_costs
from autoplan.search.exhaustive import best_pipeline
from autoplan.search.pipeline import relaxed_bound, solve_pipeline
from autoplan.search.problem import (
    SLOWNESS_UNIT,
    BlockOption,
    PipelineProblem,
    PipelineSolution,
    Run,
)
from tests.search.profiles import few, many
from tests.strategies import pipeline_problems


def solve(problem: PipelineProblem, cutoff: int | None = None) -> PipelineSolution:
    return solve_pipeline(problem, cutoff=cutoff, time_limit_s=30)


def block(time: int, **numbers: int) -> BlockOption:
    zero = {"backward": 0, "once": 0, "kept": 0, "static": 0, "working": 0}
    return BlockOption(forward=time, **{**zero, **numbers})


def chain(times: list[int], num_stages: int) -> PipelineProblem:
    return PipelineProblem(
        runs=tuple(Run(count=1, options=(block(time),)) for time in times),
        num_microbatches=8,
        live=tuple(range(num_stages, 0, -1)),
        capacity=(1,) * num_stages,
        fixed=(0,) * num_stages,
        boundary=(0,) * num_stages,
    )


@many
@given(problem=pipeline_problems())
def test_pipeline_equals_exhaustive_search(problem: PipelineProblem) -> None:
    expected = best_pipeline(problem)
    got = solve(problem)
    if expected is None:
        assert (got.status, got.ends, got.options, got.bound) == ("infeasible", (), (), 0)
        return
    assert (got.status, got.objective, got.bound) == ("optimal", expected, expected)
    costs = stage_costs(problem, got.ends, got.options)
    assert pipeline_objective(problem, costs) == expected
    assert all(cost.memory <= room for cost, room in zip(costs, problem.capacity, strict=True))
    assert set(got.ends[:-1]) <= set(cut_positions(problem))


@few
@given(problem=pipeline_problems(), data=st.data())
def test_stages_on_slower_devices_equal_exhaustive_search(
    problem: PipelineProblem, data: st.DataObject
) -> None:
    stages = problem.num_stages
    slow = st.lists(st.integers(SLOWNESS_UNIT, 4 * SLOWNESS_UNIT), min_size=stages, max_size=stages)
    problem = replace(problem, slowness=tuple(data.draw(slow)))
    expected = best_pipeline(problem)
    got = solve(problem)
    wanted = ("infeasible", 0) if expected is None else ("optimal", expected)
    assert (got.status, got.objective) == wanted


def test_a_device_of_half_the_speed_gets_half_the_blocks() -> None:
    problem = replace(chain([10] * 12, 2), slowness=(SLOWNESS_UNIT, 2 * SLOWNESS_UNIT))
    assert solve(problem).ends == (8, 12)
    with pytest.raises(ValueError, match="slowness is"):
        solve(replace(problem, slowness=(SLOWNESS_UNIT,)))


def test_options_that_differ_in_once_are_traded_against_time() -> None:
    """Forty alike blocks, far beyond exhaustive search; the reference is the one programme."""
    options = tuple(
        block(100 + 9 * o, backward=13 * o, once=700 - 90 * o, kept=60 - 7 * o, working=5 * o)
        for o in range(6)
    )
    problem = PipelineProblem(
        runs=(Run(count=1, options=(block(70, once=900),)), Run(count=40, options=options)),
        num_microbatches=4,
        live=(3, 2, 1),
        capacity=(1800, 1500, 1100),
        fixed=(0, 0, 0),
        boundary=(5, 10, 5),
    )
    expected = solve_by_counting(problem, time_limit_s=300)
    got = solve_pipeline(problem, time_limit_s=300)
    assert (got.status, expected.status) == ("optimal", "optimal")
    assert got.objective == expected.objective


@few
@given(problem=pipeline_problems())
def test_only_solutions_strictly_below_the_cutoff_are_returned(problem: PipelineProblem) -> None:
    expected = best_pipeline(problem)
    assume(expected is not None)
    assert expected is not None
    at_best = solve(problem, expected)
    assert (at_best.status, at_best.bound, at_best.ends) == ("infeasible", expected, ())
    assert solve(problem, expected + 1).objective == expected


@few
@given(problem=pipeline_problems())
def test_the_counting_programme_equals_exhaustive_search(problem: PipelineProblem) -> None:
    got = solve_by_counting(problem, time_limit_s=30)
    expected = best_pipeline(problem)
    assert got.status == ("infeasible" if expected is None else "optimal")
    assert got.objective == (expected or 0)


@few
@given(problem=pipeline_problems())
def test_relaxation_is_never_above_the_optimum(problem: PipelineProblem) -> None:
    bound, got = relaxed_bound(problem), solve(problem)
    if bound is None:
        assert got.status == "infeasible"
    elif got.options:
        assert bound <= got.objective


@few
@given(problem=pipeline_problems(), less=st.integers(1, 40))
def test_stages_solved_before_change_no_answer(problem: PipelineProblem, less: int) -> None:
    known: KnownStages = {}
    tight = replace(problem, capacity=tuple(max(0, room - less) for room in problem.capacity))
    for one in (problem, tight, problem):
        assert solve_pipeline(one, time_limit_s=30, known=known) == solve(one)


@few
@given(problem=pipeline_problems(), more=st.integers(0, 40))
def test_more_memory_never_makes_a_pipeline_slower(problem: PipelineProblem, more: int) -> None:
    roomy = replace(problem, capacity=tuple(room + more for room in problem.capacity))
    tight, loose = solve(problem), solve(roomy)
    if tight.status == "optimal":
        assert loose.status == "optimal"
        assert loose.objective <= tight.objective


@few
@given(problem=pipeline_problems(), factor=st.integers(2, 10**6))
def test_scaling_all_times_scales_the_pipeline(problem: PipelineProblem, factor: int) -> None:
    def scaled(option: BlockOption) -> BlockOption:
        return replace(
            option,
            forward=option.forward * factor,
            backward=option.backward * factor,
            once=option.once * factor,
        )

    slow = replace(
        problem,
        runs=tuple(
            replace(run, options=tuple(scaled(option) for option in run.options))
            for run in problem.runs
        ),
        boundary=tuple(time * factor for time in problem.boundary),
        crossing=tuple(time * factor for time in problem.crossing),
        constant=problem.constant * factor,
        grain=problem.grain * factor,
        once_grain=problem.once_grain * factor,
    )
    assert solve(slow).objective == solve(problem).objective * factor


@few
@given(problem=pipeline_problems())
def test_a_run_is_the_same_as_its_blocks_one_by_one(problem: PipelineProblem) -> None:
    single = replace(
        problem,
        runs=tuple(replace(run, count=1) for run in problem.runs for _ in range(run.count)),
    )
    assert solve(single).objective == solve(problem).objective


@few
@given(problem=pipeline_problems())
def test_reversed_option_order_changes_no_objective(problem: PipelineProblem) -> None:
    reversed_runs = tuple(replace(run, options=run.options[::-1]) for run in problem.runs)
    other = solve(replace(problem, runs=reversed_runs))
    assert other.objective == solve(problem).objective


@few
@given(problem=pipeline_problems())
def test_the_same_pipeline_gets_the_same_answer(problem: PipelineProblem) -> None:
    assert solve(problem) == solve(problem)


@pytest.mark.parametrize(("num_stages", "ends", "slowest"), [(2, (6, 9), 36), (3, (4, 8, 9), 24)])
def test_a_heavy_head_gets_a_stage_by_its_time(
    num_stages: int, ends: tuple[int, ...], slowest: int
) -> None:
    problem = chain([4, *[6] * 7, 24], num_stages)
    got = solve(problem)
    assert got.ends == ends
    assert got.objective == 70 + 7 * slowest


def test_a_heavy_head_is_cut_the_same_when_blocks_are_counted() -> None:
    problem = chain([4, *[6] * 7, 24], 3)
    runs = (problem.runs[0], Run(count=7, options=(block(6),)), problem.runs[-1])
    assert solve(replace(problem, runs=runs)).ends == (4, 8, 9)


def test_recompute_is_chosen_only_where_more_microbatches_are_alive() -> None:
    keep, redo = block(10, backward=20, kept=10), block(10, backward=30, kept=1)
    problem = PipelineProblem(
        runs=(Run(count=4, options=(keep, redo)),),
        num_microbatches=1,
        live=(2, 1),
        capacity=(22, 22),
        fixed=(0, 0),
        boundary=(0, 0),
        min_blocks=2,
    )
    got = solve(problem)
    assert got.options == (0, 1, 0, 0)


def test_together_keeps_first_and_last_block_on_one_stage() -> None:
    problem = replace(chain([1, 1, 1], 2), together=((0, 2),))
    assert solve(problem).status == "infeasible"


def test_min_blocks_forbids_a_stage_of_its_own_for_the_head() -> None:
    assert solve(replace(chain([1, 1, 1, 9], 2), min_blocks=2)).ends == (2, 4)


def test_a_time_limit_of_nothing_is_a_status_and_not_an_error() -> None:
    got = solve_pipeline(chain([4, *[6] * 7, 24], 3), time_limit_s=0.0)
    assert got.status in ("unknown", "feasible", "optimal")
    assert got.bound <= 70 + 7 * 24


def test_distinct_blocks_on_four_stages_are_proven() -> None:
    runs = tuple(
        Run(
            count=1,
            options=tuple(
                block(1000 + 37 * (b % 7), backward=100 * o, kept=(8 - o) * (50 + b), working=9 * o)
                for o in range(8)
            ),
        )
        for b in range(24)
    )
    problem = PipelineProblem(
        runs=runs,
        num_microbatches=16,
        live=(4, 3, 2, 1),
        capacity=(6000,) * 4,
        fixed=(0,) * 4,
        boundary=(5,) * 4,
    )
    assert solve(problem).status == "optimal"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"boundary": (0,)}, "lengths"),
        ({"crossing": (0, 0, 0, 0, 0, 0, 0, 0)}, "crossing"),
        ({"cut_allowed": (True,)}, "cut_allowed"),
        ({"together": ((0, 9),)}, "together"),
        ({"min_blocks": 0}, "min_blocks"),
        ({"runs": ()}, "no runs"),
    ],
)
def test_a_malformed_pipeline_is_refused_with_the_field(
    change: dict[str, object], message: str
) -> None:
    problem = replace(chain([1, 2, 3], 2), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        solve(problem)
