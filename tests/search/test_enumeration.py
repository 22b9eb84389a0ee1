"""The enumeration of mixes: what it proves is what trying all of them gives."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.search import enumeration
from autoplan.search.enumeration import best_within
from tests.search.profiles import few

NUMBER = st.integers(0, 12)
OPTIONS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=4)


Numbers = tuple[int, int, int]


def least_time(counts: list[int], runs: list[list[Numbers]], limits: Numbers) -> int | None:
    """Return the least time of all mixes within limits, None if there is none."""
    blocks = [own for count, own in zip(counts, runs, strict=True) for _ in range(count)]
    sums = (tuple(map(sum, zip(*chosen, strict=True))) for chosen in product(*blocks))
    fitting = [own for own in sums if all(a <= b for a, b in zip(own, limits, strict=True))]
    return min((time for _, time, _ in fitting), default=None)


@few
@given(
    runs=st.lists(OPTIONS, min_size=1, max_size=2),
    counts=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    limits=st.tuples(*[st.integers(0, 40)] * 3),
    prices=st.tuples(*[st.sampled_from((0.0, 0.3, 1.0, 2.5))] * 2),
)
def test_an_enumeration_finds_the_fastest_mix_at_any_prices(
    runs: list[list[Numbers]], counts: list[int], limits: Numbers, prices: tuple[float, float]
) -> None:
    counts = counts[: len(runs)]
    numbers = [np.array(own, dtype=np.int64).T for own in runs]
    found = best_within(counts, numbers, limits, prices)
    assert found.is_proof
    best = least_time(counts, runs, limits)
    assert bool(found.counts) == (best is not None)
    if best is not None:
        total = sum(own @ np.array(n) for own, n in zip(numbers, found.counts, strict=True))
        assert [sum(n) for n in found.counts] == counts
        assert total[1] == best
        assert (total <= np.array(limits)).all()


def test_an_enumeration_that_is_cut_short_proves_nothing_but_may_find_a_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enumeration, "_MAX_LABELS", 1)
    numbers = [np.array([(0, 9, 0), (3, 5, 1), (8, 1, 2)], dtype=np.int64).T]
    cut = best_within([2], numbers, (11, 30, 4), (1.0, 0.0))
    assert (cut.counts, cut.is_proof) == ((), False)
    some = best_within([2], numbers, (11, 30, 4), (1.0, 0.0), is_thorough=True)
    assert sum(map(sum, some.counts)) == 2
    assert not some.is_proof
