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


def objectives(problem: PipelineProblem) -> dict[tuple[int, ...], int]:
    """Return the objective of every cut that fits, of blocks that have one option each."""
    found = {}
    for cuts in combinations(cut_positions(problem), problem.num_stages - 1):
        ends = (*cuts, problem.num_blocks)
        stages = list(pairwise((0, *ends)))
        if any(b - a < problem.min_blocks or not is_anchored(problem, a, b) for a, b in stages):
            continue
        costs = stage_costs(problem, ends, [0] * problem.num_blocks)
        if all(c.memory <= room for c, room in zip(costs, problem.capacity, strict=True)):
            found[ends] = pipeline_objective(problem, costs)
    return found


def decided(problem: PipelineProblem) -> PipelineProblem:
    """Return the problem with the first option of every block only."""
    runs = tuple(replace(run, options=run.options[:1]) for run in problem.runs)
    return replace(problem, runs=runs)


@LAWS
@given(pipeline_problems(), st.floats(0.9, 1.5))
def test_no_cut_within_a_limit_is_left_out(problem: PipelineProblem, factor: float) -> None:
    problem = decided(problem)
    every = objectives(problem)
    limit = int(factor * min(every.values(), default=1000))
    found = cuts_below(problem, limit, 10_000)
    assert found is not None
    assert len(set(found)) == len(found)
    assert {ends for ends, objective in every.items() if objective <= limit} <= set(found)


@LAWS
@given(pipeline_problems())
def test_more_cuts_than_asked_for_are_no_answer(problem: PipelineProblem) -> None:
    problem = decided(problem)
    found = cuts_below(problem, 10**9, 10_000)
    assert found is not None
    assert cuts_below(problem, 10**9, len(found)) == found
    if found:
        assert cuts_below(problem, 10**9, len(found) - 1) is None
