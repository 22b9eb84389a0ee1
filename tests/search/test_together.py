"""The bound from what all ranks hold together, against pipelines that are solved."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from autoplan.search.exhaustive import best_pipeline
from autoplan.search.problem import BlockOption, PipelineProblem, Run
from autoplan.search.together import together_bound
from tests.strategies import pipeline_problems


def bound_of(problem: PipelineProblem) -> int | None:
    room = [c - f for c, f in zip(problem.capacity, problem.fixed, strict=True)]
    return together_bound(
        problem.runs, problem.live, room, problem.boundary, problem.num_microbatches
    )


@settings(deadline=None)
@given(problem=pipeline_problems())
def test_no_pipeline_is_below_the_bound(problem: PipelineProblem) -> None:
    best, bound = best_pipeline(problem), bound_of(problem)
    if best is not None:
        assert bound is not None
        assert bound + problem.constant <= best


OPTIONS = (
    BlockOption(forward=10, backward=20, once=0, kept=4, static=2, working=0),
    BlockOption(forward=10, backward=30, once=0, kept=1, static=2, working=0),
)


def pipeline(room: int) -> PipelineProblem:
    """Return eight alike blocks on two ranks, of which the first keeps more."""
    return PipelineProblem(
        runs=(Run(count=8, options=OPTIONS),),
        num_microbatches=4,
        live=(2, 1),
        capacity=(room, room),
        fixed=(0, 0),
        boundary=(0, 0),
    )


def test_the_bound_is_the_optimum_where_blocks_mix_freely() -> None:
    for room in (16, 19, 24, 40):
        problem = pipeline(room)
        bound, best = bound_of(problem), best_pipeline(problem)
        assert bound is not None
        assert best is not None
        assert 0.85 * best <= bound <= best


def test_ranks_that_hold_too_little_together_are_told() -> None:
    assert bound_of(pipeline(11)) is None
    assert bound_of(replace(pipeline(11), capacity=(11, 200))) is not None
