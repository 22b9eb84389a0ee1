"""Options of stages under common paces: they fit, and lose little against any choice."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.paces import PacedRank, paced_options
from autoplan.search.problem import BlockOption

OPTIONS = tuple(
    BlockOption(forward=time, backward=0, once=0, kept=kept, static=1, working=0)
    for time, kept in ((10, 9), (12, 5), (17, 2))
)
USABLE = (0, 1, 2)


def time_of(blocks: tuple[int, ...] | list[int]) -> int:
    return sum(OPTIONS[option].forward for option in blocks)


def held_by(blocks: tuple[int, ...] | list[int], live: float) -> float:
    return sum(OPTIONS[option].static + live * OPTIONS[option].kept for option in blocks)


def pace(stages: list[list[list[int]]], ranks: list[PacedRank]) -> int:
    """Return the sum of the slowest c-th stages."""
    longest: list[int] = [
        max(time_of(own[c]) + rank.load[c] for own, rank in zip(stages, ranks, strict=True))
        for c in range(len(ranks[0].sizes))
    ]
    return sum(longest)


def least_pace(ranks: list[PacedRank]) -> int | None:
    """Return the least sum of paces, by trying all of them."""
    ways = [list(combinations_with_replacement(USABLE, size)) for size in ranks[0].sizes]
    times = [
        sorted({time_of(way) + rank.load[c] for way in own for rank in ranks})
        for c, own in enumerate(ways)
    ]
    best = None
    for paces in product(*times):
        fits = True
        for rank in ranks:
            held = 0.0
            for c, own in enumerate(ways):
                within = [w for w in own if time_of(w) + rank.load[c] <= paces[c]]
                held += min((held_by(w, rank.live[c]) for w in within), default=10**9)
            fits &= held <= rank.room
        if fits and (best is None or sum(paces) < best):
            best = sum(paces)
    return best


@settings(deadline=None)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(20, 140),
    st.integers(20, 140),
    st.integers(0, 9),
)
def test_stages_fit_and_wait_for_little_more_than_the_best_do(
    first: int, second: int, room: int, other: int, load: int
) -> None:
    sizes = (first, second)
    ranks = [
        PacedRank(sizes=sizes, load=(load, 0), live=(3, 3), room=room),
        PacedRank(sizes=sizes, load=(0, load), live=(2, 4), room=other),
    ]
    found, best = paced_options(OPTIONS, USABLE, ranks), least_pace(ranks)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        for own, rank in zip(found, ranks, strict=True):
            assert tuple(map(len, own)) == sizes
            assert sum(held_by(own[c], rank.live[c]) for c in range(len(own))) <= rank.room
        assert best <= pace(found, ranks) <= 1.1 * best


def test_a_rank_with_room_is_fast_within_the_paces_of_one_without() -> None:
    ranks = [PacedRank(sizes=(1, 1), load=(0, 0), live=(1, 1), room=room) for room in (9, 12)]
    assert paced_options(OPTIONS, USABLE, ranks) == [[[1], [2]], [[1], [1]]]


def test_only_usable_options_are_taken() -> None:
    ranks = [PacedRank(sizes=(2, 2), load=(0, 0), live=(1, 1), room=1000)]
    assert paced_options(OPTIONS, (2,), ranks) == [[[2, 2], [2, 2]]]
