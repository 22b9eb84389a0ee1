"""Level 1 by elimination: the whole frontier, equal to exhaustive search and to CP-SAT."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autoplan.search.choice import solve_choice
from autoplan.search.elimination import eliminate, structure_of
from autoplan.search.evaluate import choice_cost
from autoplan.search.exhaustive import best_choice, pareto_choices
from autoplan.search.frontier import (
    Eliminations,
    choice_frontier,
    fastest_choice,
    frontier_cover,
    whole_frontier,
)
from autoplan.search.labels import supported
from autoplan.search.problem import ChoiceOption, ChoiceProblem, ChoiceSolution
from tests.search.profiles import few, many
from tests.strategies import choice_problems


def costs_of(points: tuple[ChoiceSolution, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((point.time, point.memory) for point in points)


def too_wide(problem: ChoiceProblem) -> Eliminations:
    """Return eliminations that know the problem as one without an order of few keys."""
    return Eliminations({structure_of(problem): None})


@many
@given(problem=choice_problems(max_ops=6))
def test_whole_frontier_equals_exhaustive_search(problem: ChoiceProblem) -> None:
    points = whole_frontier(problem)
    assert points is not None
    assert costs_of(points) == pareto_choices(problem)
    for point in points:
        assert choice_cost(problem, point.options) == (point.time, point.memory)


@many
@given(problem=choice_problems(max_ops=6))
def test_fastest_choice_equals_exhaustive_search(problem: ChoiceProblem) -> None:
    expected = best_choice(problem, None)
    got = fastest_choice(problem, time_limit_s=20)
    if expected is None:
        assert (got.status, got.options) == ("infeasible", ())
        return
    assert (got.status, got.time, got.memory, got.bound) == ("optimal", *expected, expected[0])
    assert choice_cost(problem, got.options) == expected


@few
@given(problem=choice_problems(max_ops=6), points=st.integers(1, 5))
def test_sampled_frontier_is_the_one_of_cp_sat(problem: ChoiceProblem, points: int) -> None:
    quick = choice_frontier(problem, points=points, time_limit_s=20)
    slow = choice_frontier(problem, points=points, time_limit_s=20, eliminations=too_wide(problem))
    assert costs_of(quick) == costs_of(slow)


@few
@given(problem=choice_problems(max_ops=6))
def test_fastest_choice_of_a_wide_block_is_the_one_of_cp_sat(problem: ChoiceProblem) -> None:
    quick = fastest_choice(problem, time_limit_s=20)
    slow = fastest_choice(problem, time_limit_s=20, eliminations=too_wide(problem))
    assert (quick.status, quick.time, quick.memory) == (slow.status, slow.time, slow.memory)


@few
@given(problem=choice_problems(), factor=st.integers(2, 9))
def test_problems_that_differ_in_costs_only_share_their_steps(
    problem: ChoiceProblem, factor: int
) -> None:
    ops = tuple(
        tuple(replace(option, time=factor * option.time + 1) for option in choices)
        for choices in problem.ops
    )
    other = replace(problem, ops=ops)
    eliminations = Eliminations()
    assert eliminations.of(problem) is eliminations.of(other)
    points = whole_frontier(other, eliminations=eliminations)
    assert points is not None
    assert costs_of(points) == pareto_choices(other)


@few
@given(problem=choice_problems(max_ops=6), shift=st.sampled_from((25, 50)))
def test_costs_whose_products_exceed_64_bits_give_the_same_points(
    problem: ChoiceProblem, shift: int
) -> None:
    time, memory = 2 ** (50 - shift), 2**shift
    ops = tuple(
        tuple(replace(o, time=time * o.time, memory=memory * o.memory) for o in choices)
        for choices in problem.ops
    )
    links = tuple(
        replace(
            link,
            transitions=tuple(
                tuple(c and (time * c[0], memory * c[1]) for c in row) for row in link.transitions
            ),
        )
        for link in problem.links
    )
    large = replace(problem, ops=ops, links=links)
    points = whole_frontier(large)
    assert points is not None
    expected = [(time * t, memory * m) for t, m in pareto_choices(problem)]
    assert list(costs_of(points)) == expected
    got = fastest_choice(large, time_limit_s=20)
    assert [(got.time, got.memory)] == expected[:1] or got.status == "infeasible"


@few
@given(problem=choice_problems())
def test_supported_points_are_pareto_points_with_both_ends(problem: ChoiceProblem) -> None:
    steps = eliminate(problem)
    assert steps is not None
    expected = pareto_choices(problem)
    got = [(label.time, label.memory) for label in supported(steps, steps.costs(problem))]
    assert set(got) <= set(expected)
    assert (got[:1], got[-1:]) == (list(expected[:1]), list(expected[-1:]))


@few
@given(problem=choice_problems(max_ops=6), tolerance=st.sampled_from((0.0, 0.1, 0.5)))
def test_a_cover_has_a_stand_in_for_every_point_and_both_ends(
    problem: ChoiceProblem, tolerance: float
) -> None:
    expected = pareto_choices(problem)
    cover = costs_of(frontier_cover(problem, tolerance=tolerance, points=99, time_limit_s=20))
    assert set(cover) <= set(expected)
    assert (cover[:1], cover[-1:]) == (expected[:1], expected[-1:])
    for time, memory in expected:
        assert any(t <= time * (1 + tolerance) and m <= memory for t, m in cover)
    if tolerance == 0:
        assert cover == expected


def test_equally_good_options_give_the_smallest_index() -> None:
    same = ChoiceOption(produces=0, time=4, memory=4)
    problem = ChoiceProblem(ops=((same, same),) * 3, links=())
    points = choice_frontier(problem, points=3, time_limit_s=20)
    assert [point.options for point in points] == [(0, 0, 0)]
    assert fastest_choice(problem, time_limit_s=20).options == (0, 0, 0)


def test_forty_marks_give_as_many_points_as_they_have_sums() -> None:
    """Far beyond exhaustive search: keep (memory i) or redo (time i), so time + memory is fixed."""
    ops = tuple(
        (
            ChoiceOption(produces=0, time=0, memory=index),
            ChoiceOption(produces=0, time=index, memory=0),
        )
        for index in range(1, 41)
    )
    problem = ChoiceProblem(ops=ops, links=())
    points = whole_frontier(problem)
    total = 40 * 41 // 2
    assert points is not None
    assert costs_of(points) == tuple((time, total - time) for time in range(total + 1))
    half = solve_choice(problem, total // 2, time_limit_s=20)
    assert half.time == total - total // 2
