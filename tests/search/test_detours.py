"""Stages with a stretch of blocks that hand over in another way, against exhaustive search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoplan.search.detours import hands_over
from autoplan.search.evaluate import pipeline_objective, stage_costs
from autoplan.search.exhaustive import best_pipeline
from autoplan.search.pipeline import relaxed_bound, solve_pipeline
from autoplan.search.problem import BlockOption, Detour, PipelineProblem, Run
from autoplan.search.together import together_bound
from tests.search.profiles import many
from tests.strategies import block_options, pipeline_problems


@st.composite
def problems(draw: st.DrawFn) -> PipelineProblem:
    """Draw a small pipeline, some runs of which have one or two detours."""
    problem = draw(pipeline_problems(max_blocks=4))
    runs = []
    for run in problem.runs:
        options, detours = list(run.options[:2]), []
        for _ in range(draw(st.integers(0, 2 if run.count < 4 else 1))):
            ranges = []
            for least in (1, 0, 1):
                own = draw(st.lists(block_options(), min_size=least, max_size=1))
                ranges.append(range(len(options), len(options) + len(own)))
                options += own
            detours.append(Detour(first=ranges[0], inner=ranges[1], last=ranges[2]))
        runs.append(Run(count=run.count, options=tuple(options), detours=tuple(detours)))
    return replace(problem, runs=tuple(runs))


@many
@given(problem=problems())
def test_pipelines_with_detours_equal_exhaustive_search(problem: PipelineProblem) -> None:
    assume(any(run.detours for run in problem.runs))
    expected = best_pipeline(problem)
    got = solve_pipeline(problem, time_limit_s=30)
    if expected is None:
        assert got.status == "infeasible"
        return
    assert (got.status, got.objective) == ("optimal", expected)
    assert hands_over(problem, got.ends, got.options)
    costs = stage_costs(problem, got.ends, got.options)
    assert pipeline_objective(problem, costs) == expected


@many
@given(problem=problems())
def test_bounds_know_detours(problem: PipelineProblem) -> None:
    expected = best_pipeline(problem)
    assume(expected is not None)
    assert expected is not None
    relaxed = relaxed_bound(problem)
    room = [c - f for c, f in zip(problem.capacity, problem.fixed, strict=True)]
    together = together_bound(
        problem.runs, problem.live, room, problem.boundary, problem.num_microbatches
    )
    assert relaxed is not None
    assert together is not None
    assert max(relaxed, together + problem.constant) <= expected


def option(time: int, kept: int) -> BlockOption:
    return BlockOption(forward=time, backward=0, once=0, kept=kept, static=0, working=0)


FAST, LEAN = option(10, 10), option(14, 4)
ROW = Run(
    count=6,
    options=(FAST, option(12, 7), LEAN, option(12, 7)),
    detours=(Detour(first=range(1, 2), inner=range(2, 3), last=range(3, 4)),),
)


def row(room: int) -> PipelineProblem:
    """Return six blocks that are fast in one way and lean in the other, in one stage."""
    return PipelineProblem(
        runs=(ROW,),
        num_microbatches=1,
        live=(1,),
        capacity=(room,),
        fixed=(0,),
        boundary=(0,),
    )


def test_blocks_of_both_ways_are_mixed_under_a_limit_between_them() -> None:
    assert solve_pipeline(row(60), time_limit_s=5).options == (0,) * 6
    mixed = solve_pipeline(row(42), time_limit_s=5)
    assert mixed.options == (0, 0, 1, 2, 2, 3)
    assert mixed.objective == 3 * 10 + 3 * 14
    assert solve_pipeline(row(29), time_limit_s=5).status == "infeasible"


def test_one_block_takes_no_detour() -> None:
    problem = replace(row(8), runs=(replace(ROW, count=1),))
    assert solve_pipeline(problem, time_limit_s=5).status == "infeasible"


@pytest.mark.parametrize(
    "detour",
    [
        Detour(first=range(2, 3), inner=range(1, 2), last=range(3, 4)),
        Detour(first=range(1, 1), inner=range(1, 3), last=range(3, 4)),
        Detour(first=range(1, 2), inner=range(2, 2), last=range(2, 3)),
    ],
)
def test_detours_that_are_not_the_last_options_are_refused(detour: Detour) -> None:
    problem = replace(row(60), runs=(replace(ROW, detours=(detour,)),))
    with pytest.raises(ValueError, match="detours"):
        solve_pipeline(problem, time_limit_s=5)
