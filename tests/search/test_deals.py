"""Stages that run at the same time, against every way to run them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.search.deals import deal_rank, grown_ways, undominated
from tests.search.dealt_ranks import NUMBERS, Rank, fitting_costs, ranks


@given(ranks())
def test_the_ways_of_a_rank_are_the_cheapest_that_fit_at_every_instant(
    rank: Rank,
) -> None:
    costs, held, room = rank
    fitting = fitting_costs(rank)
    found = deal_rank(costs, held, room)
    if found is None:
        assert not fitting
        return
    assert found.cost == pytest.approx(min(fitting))
    assert found.bound <= min(fitting) + 1e-6
    total = sum(own[:, way] for own, way in zip(held, found.ways, strict=True))
    assert np.max(total) <= room


BLOCKS = st.lists(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.just(3), NUMBERS), min_size=1, max_size=4),
    min_size=1,
    max_size=3,
)


def memory(kept: int, working: int, alive: int) -> int:
    return alive * kept + working


@given(BLOCKS, NUMBERS, st.integers(1, 4), st.integers(0, 60))
def test_ways_of_a_stage_leave_out_nothing_that_is_cheaper_and_fits(
    options: list[list[tuple[int, ...]]], floor: int, alive: int, room: int
) -> None:
    weight = 5
    blocks = [np.array(own, dtype=np.int64).T for own in options]
    stage = grown_ways(blocks, floor, 1e9, weight)
    assert stage.is_all
    assert stage.is_once_known

    def cost(time: int, once: int) -> int:
        return weight * max(0, time - floor) + once

    every = []
    for chosen in itertools.product(*options):
        working = later = 0
        for block in reversed(chosen):
            working, later = max(working, block[4] - later), later + block[2]
        time, once, kept = (sum(block[i] for block in chosen) for i in range(3))
        every.append((cost(time, once), memory(kept, working, alive)))
    numbers = zip(*(own.tolist() for own in (stage.time, stage.once, stage.kept)), strict=True)
    ways = [
        (cost(time, once), memory(kept, working, alive))
        for (time, once, kept), working in zip(numbers, stage.working.tolist(), strict=True)
    ]
    assert set(ways) <= set(every)
    least = min((ticks for ticks, held in every if held <= room), default=None)
    assert min((ticks for ticks, held in ways if held <= room), default=None) == least


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_what_is_left_out_is_beaten_by_what_is_kept(rows: list[tuple[int, ...]]) -> None:
    numbers = np.array(rows, dtype=np.int64).T
    kept = [rows[place] for place in undominated(numbers).tolist()]
    assert len(set(kept)) == len(kept)
    for row in rows:
        assert any(all(a <= b for a, b in zip(own, row, strict=True)) for own in kept)
    for one, other in itertools.permutations(kept, 2):
        assert not all(a <= b for a, b in zip(one, other, strict=True))
