"""Level 3: the best setting wins, every other one says why not, and ends early in good order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from autoplan.search.candidates import Candidate, Refinement
from autoplan.search.cp_sat import run_solver
from autoplan.search.mesh import Progress, search_settings
from autoplan.search.problem import PipelineSolution, Status
from tests.search.profiles import few


def answer(status: Status, objective: int, bound: int) -> PipelineSolution:
    return PipelineSolution(
        status=status, ends=(1,), options=(0,), objective=objective, bound=bound
    )


def known_solver(objective: int | None) -> Callable[[int | None, float], PipelineSolution]:
    """Return a solver of a setting whose best objective is known; None has no solution."""

    def solve(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        if objective is None or (cutoff is not None and objective >= cutoff):
            return answer("infeasible", 0, cutoff or 0)
        return answer("optimal", objective, objective)

    return solve


def candidate(
    key: int,
    bound: int,
    objective: int | None,
    *,
    solve: Callable[[int | None, float], PipelineSolution] | None = None,
    refine: Callable[[], Refinement] | None = None,
    infeasible: str | None = None,
) -> Candidate:
    return Candidate(
        name=f"c{key}",
        key=(key,),
        lower_bound=bound,
        solve=solve or known_solver(objective),
        refinements=() if refine is None else (refine,),
        infeasible=infeasible,
    )


@st.composite
def settings_drawn(draw: st.DrawFn) -> list[tuple[int, int | None]]:
    """Draw (bound, objective) of some settings, the objective None or at least the bound."""
    drawn = draw(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5)), max_size=8))
    return [(bound, None if slack is None else bound + slack) for bound, slack in drawn]


@few
@given(drawn=settings_drawn())
def test_the_least_objective_wins_and_ties_go_to_the_smaller_key(
    drawn: list[tuple[int, int | None]],
) -> None:
    result = search_settings(
        [candidate(key, bound, objective) for key, (bound, objective) in enumerate(drawn)],
        time_limit_s=20,
    )
    solvable = [
        (objective, key) for key, (_, objective) in enumerate(drawn) if objective is not None
    ]
    if not solvable:
        assert (result.status, result.best_name) == ("infeasible", None)
        return
    objective, key = min(solvable)
    assert (result.status, result.best_name) == ("optimal", f"c{key}")
    assert (result.objective, result.bound, result.gap) == (objective, objective, 0.0)
    assert (result.count("best"), result.count("unexplored")) == (1, 0)


def test_every_candidate_says_why_it_is_not_the_answer() -> None:
    result = search_settings(
        [
            candidate(0, 10, 20),
            candidate(1, 12, 15),
            candidate(2, 30, 31),
            candidate(3, 5, None),
            candidate(4, 0, 0, infeasible="8 heads do not divide by tp 16"),
            candidate(5, 1, 1, refine=lambda: Refinement(infeasible="parameters alone need 90")),
            candidate(6, 1, 99, refine=lambda: Refinement(bound=50)),
        ],
        time_limit_s=20,
    )
    kinds = [outcome.kind for outcome in result.outcomes]
    assert kinds == ["slower", "best", "cut", "infeasible", "infeasible", "infeasible", "cut"]
    assert "33.33 % slower" in result.outcomes[0].reason
    assert result.outcomes[4].reason == "8 heads do not divide by tp 16"
    assert (result.num_refined, result.num_solved) == (2, 3)


@few
@given(drawn=settings_drawn(), cutoff=st.integers(0, 15))
def test_a_cutoff_leaves_what_is_below_it_alone_and_solves_nothing_that_is_not(
    drawn: list[tuple[int, int | None]], cutoff: int
) -> None:
    candidates = [candidate(key, bound, own) for key, (bound, own) in enumerate(drawn)]
    free = search_settings(candidates, time_limit_s=20)
    below = search_settings(candidates, time_limit_s=20, cutoff=cutoff)
    if free.objective is not None and free.objective < cutoff:
        assert (below.best_name, below.objective) == (free.best_name, free.objective)
    else:
        assert (below.best_name, below.status) == (None, "infeasible")
        assert below.bound >= min(cutoff, free.bound)
    assert below.num_solved <= sum(bound < cutoff for bound, _ in drawn)


def test_a_candidate_whose_bound_is_no_better_is_never_solved() -> None:
    def solve(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        raise AssertionError("solved in vain")

    result = search_settings(
        [candidate(0, 3, 7), candidate(1, 7, None, solve=solve)], time_limit_s=20
    )
    assert [outcome.kind for outcome in result.outcomes] == ["best", "cut"]


def test_a_simpler_setting_gets_the_chance_to_tie() -> None:
    result = search_settings([candidate(0, 7, 7), candidate(1, 3, 7)], time_limit_s=20)
    assert result.best_name == "c0"
    assert "simpler" in result.outcomes[1].reason


def test_a_time_limit_returns_the_best_with_its_gap() -> None:
    def slow(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        time.sleep(0.05)
        return answer("unknown", 0, 6)

    result = search_settings(
        [candidate(0, 1, 10), candidate(1, 5, None, solve=slow)], time_limit_s=0.2
    )
    assert (result.status, result.objective, result.bound) == ("feasible", 10, 6)
    assert result.gap == pytest.approx(0.4)
    assert [outcome.kind for outcome in result.outcomes] == ["best", "unexplored"]


def test_an_unproven_best_is_taken_up_again_until_it_is_proven() -> None:
    calls: list[int | None] = []

    def solve(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        calls.append(cutoff)
        if cutoff is None:
            return answer("feasible", 10, 4)
        return answer("infeasible", 0, cutoff)

    result = search_settings([candidate(0, 1, None, solve=solve)], time_limit_s=20)
    assert (result.status, result.objective, result.bound) == ("optimal", 10, 10)
    assert calls == [None, 10]


def test_stopping_returns_the_best_with_its_gap() -> None:
    seen: list[Progress] = []
    result = search_settings(
        [candidate(0, 2, 10), candidate(1, 5, 9)],
        time_limit_s=20,
        should_stop=lambda: bool(seen),
        progress=seen.append,
    )
    assert (result.status, result.is_interrupted) == ("feasible", True)
    assert (result.objective, result.bound, result.gap) == (10, 5, 0.5)
    assert seen[-1].objective == 10


def interrupted(cutoff: int | None, time_limit_s: float) -> PipelineSolution:
    raise KeyboardInterrupt


def test_ctrl_c_returns_the_best_with_its_gap() -> None:
    result = search_settings(
        [candidate(0, 2, 10), candidate(1, 5, None, solve=interrupted)], time_limit_s=20
    )
    assert (result.status, result.is_interrupted) == ("feasible", True)
    assert (result.objective, result.bound) == (10, 5)


def test_ctrl_c_before_any_solution_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt):
        search_settings([candidate(0, 2, None, solve=interrupted)], time_limit_s=20)


def test_equal_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="same key"):
        search_settings([candidate(0, 1, 1), candidate(0, 2, 2)], time_limit_s=20)


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_stops_a_running_solver_at_once() -> None:
    """The marked-square problem is far from a proof after a second."""
    model = cp_model.CpModel()
    size = 40
    cells = [[model.new_bool_var("") for _ in range(size)] for _ in range(size)]
    for left in range(size):
        for right in range(left):
            common = []
            for column in range(size):
                both = model.new_bool_var("")
                model.add_bool_or([~cells[left][column], ~cells[right][column], both])
                common.append(both)
            model.add(sum(common) <= 1)
    model.minimize(-sum(cell for row in cells for cell in row))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_solver(model, [], time_limit_s=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 10
