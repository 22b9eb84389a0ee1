"""The list of all answers of a small pipeline problem, against exhaustive search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoplan.search.evaluate import pipeline_objective, stage_costs
from autoplan.search.exhaustive import best_pipeline
from autoplan.search.listing import answers_below, num_answers
from autoplan.search.problem import BlockOption, PipelineProblem, Run
from tests.search.profiles import few
from tests.strategies import pipeline_problems


@few
@given(problem=pipeline_problems(max_blocks=4))
def test_the_first_answer_that_fits_is_the_best_there_is(problem: PipelineProblem) -> None:
    for objective, ends, options in answers_below(problem, None):
        costs = stage_costs(problem, ends, options)
        assert pipeline_objective(problem, costs) == objective
        if all(cost.memory <= room for cost, room in zip(costs, problem.capacity, strict=True)):
            assert objective == best_pipeline(problem)
            return
    assert best_pipeline(problem) is None


@few
@given(problem=pipeline_problems(max_blocks=4), share=st.floats(0.5, 1.5))
def test_a_limit_leaves_the_answers_below_it_in_order(
    problem: PipelineProblem, share: float
) -> None:
    every = list(answers_below(problem, None))
    assert len(set(every)) == len(every) <= num_answers(problem)
    assert [own[0] for own in every] == sorted(own[0] for own in every)
    if every:
        limit = int(share * every[len(every) // 2][0])
        assert list(answers_below(problem, limit)) == [own for own in every if own[0] < limit]


def test_a_chain_may_have_more_blocks_than_arrays_have_dimensions() -> None:
    only = BlockOption(forward=1, backward=2, once=0, kept=1, static=1, working=0)
    other = BlockOption(forward=1, backward=1, once=0, kept=9, static=1, working=0)
    runs = (Run(count=1, options=(only, other)), Run(count=98, options=(only,)))
    problem = PipelineProblem(
        runs=(*runs, Run(count=1, options=(only, other))),
        num_microbatches=1,
        live=(1,),
        capacity=(10_000,),
        fixed=(0,),
        boundary=(0,),
    )
    found = list(answers_below(problem, None))
    assert [own[0] for own in found] == [298, 299, 299, 300]
    assert [own[2][::99] for own in found] == [(1, 1), (0, 1), (1, 0), (0, 0)]
