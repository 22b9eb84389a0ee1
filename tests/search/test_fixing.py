"""Steps with some options fixed, and costs for all options of two ops, against each by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from autoplan.search.elimination import structure_of
from autoplan.search.exhaustive import all_choices, pareto_choices
from autoplan.search.fixing import fix, least_sums, with_fixed
from autoplan.search.frontier import Eliminations, fastest_choice, whole_frontier
from autoplan.search.problem import ChoiceOption, ChoiceProblem
from tests.search.profiles import few, many
from tests.strategies import choice_problems


@many
@given(problem=choice_problems(max_ops=6), data=st.data())
def test_a_frontier_with_fixed_options_is_that_of_the_problem_without_the_others(
    problem: ChoiceProblem, data: st.DataObject
) -> None:
    ops = data.draw(st.sets(st.integers(0, len(problem.ops) - 1), max_size=2))
    fixed = {op: data.draw(st.integers(0, len(problem.ops[op]) - 1)) for op in sorted(ops)}
    points = whole_frontier(problem, fixed=fixed)
    assert points is not None
    expected = pareto_choices(with_fixed(problem, fixed))
    assert tuple((point.time, point.memory) for point in points) == expected
    fastest = fastest_choice(problem, time_limit_s=5, fixed=fixed)
    assert (fastest.status == "optimal") == bool(expected)
    if expected:
        assert (fastest.time, fastest.memory) == expected[0]
        assert all(fastest.options[op] == option for op, option in fixed.items())


@few
@given(problem=choice_problems(max_ops=5), data=st.data())
def test_least_sums_are_those_of_every_pair_of_options(
    problem: ChoiceProblem, data: st.DataObject
) -> None:
    assume(len(problem.ops) > 1)
    first, second = data.draw(st.permutations(range(len(problem.ops))))[:2]
    posed = Eliminations().posed(problem)
    assert posed is not None
    steps, costs = posed
    prices = np.array([0.0, 0.5, 3.0])
    weights = costs.time[:, None] + costs.memory[:, None] * prices
    sums = least_sums(problem, steps, weights, first, second)
    assert sums.shape == (len(problem.ops[first]), len(problem.ops[second]), 3)
    for (i, j, k), found in np.ndenumerate(sums):
        expected = min(
            (
                time + prices[k] * memory
                for time, memory, options in all_choices(problem)
                if (options[first], options[second]) == (i, j)
            ),
            default=math.inf,
        )
        assert found == expected


def test_problems_that_differ_in_what_is_fixed_share_their_steps() -> None:
    options = tuple(ChoiceOption(produces=0, time=time, memory=0) for time in (3, 2, 1))
    problem = ChoiceProblem(ops=(options,), links=())
    known = Eliminations()
    for option in range(3):
        found = fastest_choice(problem, time_limit_s=1, eliminations=known, fixed={0: option})
        assert found.time == 3 - option
    steps = known.of(problem)
    assert steps is not None
    assert len(known._known) == 1
    assert len(fix(steps, {0: 1}).steps[0].source) == 1


def test_a_problem_that_is_too_wide_in_all_ways_is_solved_in_one() -> None:
    options = tuple(ChoiceOption(produces=0, time=time, memory=0) for time in (3, 2, 1))
    problem = ChoiceProblem(ops=(options,), links=())
    wide = Eliminations({structure_of(problem): None})
    found = fastest_choice(problem, time_limit_s=5, eliminations=wide, fixed={0: 1})
    assert (found.status, found.time, found.options) == ("optimal", 2, (1,))
    wide = Eliminations(dict.fromkeys((structure_of(problem), _structure(problem, 1)), None))
    found = fastest_choice(problem, time_limit_s=5, eliminations=wide, fixed={0: 1})
    assert (found.status, found.time, found.options) == ("optimal", 2, (1,))


def _structure(problem: ChoiceProblem, option: int) -> tuple[object, ...]:
    return structure_of(with_fixed(replace(problem), {0: option}))
