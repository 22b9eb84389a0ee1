"""The frontier: monotone, undominated, and right at both ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.search.exhaustive import pareto_choices
from autoplan.search.frontier import choice_frontier
from autoplan.search.problem import ChoiceProblem
from tests.search.profiles import few
from tests.strategies import choice_problems


@few
@given(problem=choice_problems(), points=st.integers(2, 6))
def test_frontier_points_are_pareto_points_with_the_right_ends(
    problem: ChoiceProblem, points: int
) -> None:
    expected = pareto_choices(problem)
    got = choice_frontier(problem, points=points, time_limit_s=20)
    costs = [(point.time, point.memory) for point in got]
    assert set(costs) <= set(expected)
    if expected:
        assert costs[0] == expected[0]
        assert costs[-1] == expected[-1]
    assert all(
        left.memory > right.memory and left.time < right.time for left, right in pairwise(got)
    )
    assert len(got) <= points


@few
@given(problem=choice_problems())
def test_frontier_with_enough_points_is_the_whole_frontier(problem: ChoiceProblem) -> None:
    got = choice_frontier(problem, points=1000, time_limit_s=20)
    assert tuple((point.time, point.memory) for point in got) == pareto_choices(problem)


def test_frontier_refuses_no_points() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        choice_frontier(ChoiceProblem(ops=(), links=()), points=0, time_limit_s=1)
