"""The cuts that may be fast enough, against all cuts there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.evaluate import cut_positions, is_anchored, pipeline_objective, stage_costs
from autoplan.search.pipeline import cuts_below
from autoplan.search.problem import PipelineProblem
from tests.strategies import pipeline_problems

LAWS = settings(deadline=None, derandomize=True, max_examples=80)


def possible(problem: PipelineProblem) -> list[tuple[int, ...]]:
    """Return every way to cut that the rules allow."""
    every = (
        (*cuts, problem.num_blocks)
        for cuts in combinations(cut_positions(problem), problem.num_stages - 1)
    )
    return [
        ends
        for ends in every
        if all(
            b - a >= problem.min_blocks and is_anchored(problem, a, b)
            for a, b in pairwise((0, *ends))
        )
    ]


def objectives(problem: PipelineProblem) -> dict[tuple[int, ...], int]:
    """Return the objective of every cut that fits, of blocks that have one option each."""
    found = {}
    for ends in possible(problem):
        costs = stage_costs(problem, ends, [0] * problem.num_blocks)
        if all(c.memory <= room for c, room in zip(costs, problem.capacity, strict=True)):
            found[ends] = pipeline_objective(problem, costs)
    return found


def decided(problem: PipelineProblem, factor: int = 1) -> PipelineProblem:
    """Return the problem with one option per block and as many times more micro-batches."""
    runs = tuple(replace(run, options=run.options[:1]) for run in problem.runs)
    return replace(problem, runs=runs, num_microbatches=factor * problem.num_microbatches)


@LAWS
@given(pipeline_problems(), st.floats(0.9, 1.5), st.sampled_from((1, 64)))
def test_the_cuts_within_a_limit_are_all_that_are(
    problem: PipelineProblem, factor: float, more: int
) -> None:
    problem = decided(problem, more)
    every = objectives(problem)
    limit = int(factor * min(every.values(), default=1000))
    found = cuts_below(problem, limit, 10_000)
    assert found is not None
    assert len(set(found)) == len(found)
    assert {ends for ends, objective in every.items() if objective <= limit} <= set(found)
    assert set(found) <= set(possible(problem))


@LAWS
@given(pipeline_problems())
def test_more_cuts_than_asked_for_are_no_answer(problem: PipelineProblem) -> None:
    problem = decided(problem, 64)
    found = cuts_below(problem, 10**9, 10_000)
    assert found is not None
    assert cuts_below(problem, 10**9, len(found)) == found
    if found:
        assert cuts_below(problem, 10**9, len(found) - 1) is None
