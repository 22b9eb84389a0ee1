"""Prices of a rank's instants, against every way to run its stages and against a linear program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp

from autoplan.search.deals import deal_rank
from autoplan.search.duals import Duals
from tests.search.dealt_ranks import Rank, fitting_costs, ranks


def many_stages(seed: int) -> Rank:
    """Return a rank of 24 stages of 12 ways, the slower the leaner, as recomputation gives them."""
    random = np.random.default_rng(seed)
    costs, held = [], []
    for stage in range(24):
        cost = np.sort(random.uniform(0, 100, 12))
        kept = np.sort(random.uniform(0, 10, 12))[::-1]
        alive = random.integers(0, 4, 24) + (np.arange(24) == stage)
        costs.append(cost)
        held.append(alive[:, None] * kept)
    most = np.sum([own.max(axis=1) for own in held], axis=0).max()
    return costs, held, float(0.6 * most)


def linear_bound(rank: Rank) -> float:
    """Return the least cost where ways may be mixed."""
    costs, held, room = rank
    solver = pywraplp.Solver.CreateSolver("GLOP")
    capacities = [solver.Constraint(-solver.infinity(), room) for _ in held[0]]
    for cost, own in zip(costs, held, strict=True):
        one = solver.Constraint(1, 1)
        for way, number in enumerate(cost.tolist()):
            share = solver.NumVar(0, 1, "")
            one.SetCoefficient(share, 1)
            solver.Objective().SetCoefficient(share, number)
            for capacity, nbytes in zip(capacities, own[:, way].tolist(), strict=True):
                capacity.SetCoefficient(share, nbytes)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(solver.Objective().Value())


@given(ranks())
def test_prices_bound_every_way_that_fits_and_what_is_kept_fits(rank: Rank) -> None:
    costs, held, room = rank
    fitting = fitting_costs(rank)
    duals = Duals(costs, held, room)
    prices, bound = duals.best_prices()
    assert (prices >= 0).all()
    if fitting:
        assert bound <= min(fitting) + 1e-6
    if duals.best is not None:
        assert duals.best_cost >= min(fitting) - 1e-9
        total = sum(own[:, way] for own, way in zip(held, duals.best, strict=True))
        assert np.max(total) <= room
        chosen = sum(float(c[way]) for c, way in zip(costs, duals.best, strict=True))
        assert chosen == pytest.approx(duals.best_cost)


@pytest.mark.parametrize("seed", range(5))
def test_many_stages_come_near_the_linear_program_from_both_sides(seed: int) -> None:
    rank = many_stages(seed)
    least = linear_bound(rank)
    duals = Duals(*rank)
    _, bound = duals.best_prices()
    assert least * 0.99 <= bound <= least * (1 + 1e-9)
    assert duals.best_cost <= least * 1.05


@given(ranks(), st.integers(0, 8))
def test_a_deal_is_as_close_to_the_best_as_asked(rank: Rank, close: int) -> None:
    exact, near = deal_rank(*rank), deal_rank(*rank, close=close)
    assert (exact is None) == (near is None)
    if exact is not None and near is not None:
        assert exact.cost - 1e-6 <= near.cost <= exact.cost + close + 1e-6
        assert near.bound <= exact.cost + 1e-6
