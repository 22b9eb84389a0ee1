"""Level 1: CP-SAT equals exhaustive search, and the laws of its answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.search.choice import minimize_memory, solve_choice
from autoplan.search.evaluate import choice_cost
from autoplan.search.exhaustive import all_choices, best_choice
from autoplan.search.problem import ChoiceOption, ChoiceProblem, Consumer, Link
from tests.search.profiles import few, many
from tests.strategies import choice_problems


@many
@given(problem=choice_problems(), limit=st.one_of(st.none(), st.integers(0, 60)))
def test_choice_equals_exhaustive_search_in_time_and_then_in_memory(
    problem: ChoiceProblem, limit: int | None
) -> None:
    expected = best_choice(problem, limit)
    got = solve_choice(problem, limit, time_limit_s=20)
    if expected is None:
        assert (got.status, got.options) == ("infeasible", ())
        return
    assert got.status == "optimal"
    assert (got.time, got.memory) == expected
    assert got.bound == got.time
    assert choice_cost(problem, got.options) == expected


@few
@given(problem=choice_problems())
def test_least_memory_equals_exhaustive_search_in_memory_and_then_in_time(
    problem: ChoiceProblem,
) -> None:
    expected = min(((memory, time) for time, memory, _ in all_choices(problem)), default=None)
    got = minimize_memory(problem, time_limit_s=20)
    if expected is None:
        assert got.status == "infeasible"
        return
    assert (got.memory, got.time) == expected
    assert got.bound == got.memory


@few
@given(problem=choice_problems(), limit=st.integers(0, 50), more=st.integers(0, 20))
def test_more_memory_never_makes_a_choice_slower(
    problem: ChoiceProblem, limit: int, more: int
) -> None:
    tight = solve_choice(problem, limit, time_limit_s=20)
    loose = solve_choice(problem, limit + more, time_limit_s=20)
    if tight.status == "optimal":
        assert loose.time <= tight.time


@few
@given(problem=choice_problems(), limit=st.integers(5, 50), factor=st.integers(2, 1000))
def test_scaling_all_times_scales_the_objective(
    problem: ChoiceProblem, limit: int, factor: int
) -> None:
    scaled = ChoiceProblem(
        ops=tuple(
            tuple(replace(option, time=option.time * factor) for option in options)
            for options in problem.ops
        ),
        links=tuple(
            replace(
                link,
                transitions=tuple(
                    tuple(None if cost is None else (cost[0] * factor, cost[1]) for cost in row)
                    for row in link.transitions
                ),
            )
            for link in problem.links
        ),
    )
    plain = solve_choice(problem, limit, time_limit_s=20)
    assert solve_choice(scaled, limit, time_limit_s=20).time == plain.time * factor


@few
@given(problem=choice_problems(), limit=st.integers(5, 50))
def test_the_same_choice_problem_gets_the_same_answer(problem: ChoiceProblem, limit: int) -> None:
    first = solve_choice(problem, limit, time_limit_s=20)
    assert solve_choice(problem, limit, time_limit_s=20) == first


@few
@given(problem=choice_problems(), limit=st.integers(5, 50))
def test_a_hint_does_not_change_what_is_optimal(problem: ChoiceProblem, limit: int) -> None:
    plain = solve_choice(problem, limit, time_limit_s=20)
    hinted = solve_choice(problem, limit, time_limit_s=20, hint=[0] * len(problem.ops))
    assert (hinted.status, hinted.time, hinted.memory) == (plain.status, plain.time, plain.memory)


def test_a_transition_is_paid_once_for_all_consumers_of_a_state() -> None:
    free = ChoiceOption(produces=0, time=0, memory=0)
    link = Link(
        producer=0,
        consumers=(Consumer(op=1, requires=(1,)), Consumer(op=2, requires=(1,))),
        transitions=(((0, 0), (7, 3)), ((0, 0), (0, 0))),
    )
    problem = ChoiceProblem(ops=((free,), (free,), (free,)), links=(link,))
    got = solve_choice(problem, None, time_limit_s=20)
    assert (got.time, got.memory) == (7, 3)


def test_equal_options_give_the_smallest_index() -> None:
    same = ChoiceOption(produces=0, time=4, memory=4)
    problem = ChoiceProblem(ops=((same, same, same),) * 3, links=())
    assert solve_choice(problem, None, time_limit_s=20).options == (0, 0, 0)


def test_a_malformed_choice_problem_is_refused_with_the_place() -> None:
    with pytest.raises(ValueError, match="op 0 has no option"):
        solve_choice(ChoiceProblem(ops=((),), links=()), None, time_limit_s=1)
