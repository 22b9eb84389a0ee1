"""Options of stages under common paces, where ranks have several stages.

All ranks run their c-th stages at the same time, so a step goes by the pace[c] of the slowest.
What a rank needs is the sum over its stages:

    minimise   sum_c pace[c]
    subject to sum_c held[r,c](pace[c] - load[r,c]) <= room[r]
    with       held[r,c](t) the least that size[r,c] blocks hold which take no longer than t

Paces are found in two ways: all lowered together as far as the ranks allow; and raised from what
the slowest c-th stage takes at the least, rank by rank, the one that lacks most first, as little as
lets it hold its own (a knapsack of a way for each stage, solved by a price on what is held, then by
better ways for single stages while there is room). Both are lowered one by one; the lesser sum
counts, and within it each rank is as fast as it may be. That is a heuristic for what the bound of
the ranks' shares leaves open.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import BlockOption

__all__ = ["PacedRank", "paced_options"]

_HALVINGS = 40
_PACE_HALVINGS = 14
_MOST_PRICE = 2.0**60
_MOST_POINTS = 256

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedRank:
    """A rank of several stages.

    Attributes:
        sizes: blocks of each stage.
        load: ticks that each stage has besides.
        live: micro-batches that a block keeps, by stage.
        room: memory units for what the blocks hold.
    """

    sizes: tuple[int, ...]
    load: tuple[int, ...]
    live: tuple[float, ...]
    room: int


@dataclass(frozen=True, slots=True)
class _Front:
    """Ways to run a number of blocks, leaner the slower, with the options of each."""

    times: list[int]
    held: list[int]
    options: list[tuple[int, ...]]

    def within(self, ticks: float) -> int:
        """Return the index of the leanest way that takes no longer, -1 if none is as fast."""
        return bisect_right(self.times, ticks) - 1


def paced_options(
    options: Sequence[BlockOption], usable: Sequence[int], ranks: Sequence[PacedRank]
) -> list[list[list[int]]] | None:
    """Return the option of every block of each stage of each rank, or None if nothing fits.

    Args:
        options: of the alike blocks.
        usable: indices of those that may be taken.
        ranks: their numbers of stages are equal.
    """
    fronts = _fronts(options, usable, ranks)
    loaded = list(zip(fronts, ranks, strict=True))
    fast, slow = (
        [
            max(float(own[chunk].times[end] + rank.load[chunk]) for own, rank in loaded)
            for chunk in range(len(ranks[0].sizes))
        ]
        for end in (0, -1)
    )

    def lacks(own: Sequence[_Front], rank: PacedRank, paces: Sequence[float]) -> float:
        """Return what the leanest ways within the paces hold beyond the room."""
        ways = _within(own, rank, paces)
        return sum(front.held[way] for front, way in zip(own, ways, strict=True)) - rank.room

    def fits(paces: Sequence[float]) -> bool:
        return all(lacks(own, rank, paces) <= 0 for own, rank in loaded)

    if not fits(slow):
        return None
    raised = fast
    for own, rank in sorted(loaded, key=lambda one: -lacks(one[0], one[1], fast)):
        if lacks(own, rank, raised) > 0:
            raised = _raised(own, rank, raised)
    paces = min(
        (_lowered_by_one(fast, start, fits) for start in (_lowered(fast, slow, fits), raised)),
        key=sum,
    )
    found = []
    for own, rank in loaded:
        late = _delays(own, rank, paces)
        times = [np.array(front.times, dtype=np.float64) for front in own]
        times = [np.where(d > 0, np.inf, t) for d, t in zip(late, times, strict=True)]
        ways = _cheapest(own, rank.room, times)
        assert ways is not None, "paces were raised to where all fit"
        found.append([sorted(f.options[w]) for f, w in zip(own, ways, strict=True)])
    return found


def _raised(fronts: Sequence[_Front], rank: PacedRank, paces: Sequence[float]) -> list[float]:
    """Return paces within which a rank has room, raised by little."""
    ways = _cheapest(fronts, rank.room, _delays(fronts, rank, paces))
    assert ways is not None, "the slowest paces give every rank room"
    return [
        max(pace, float(front.times[way] + beside))
        for pace, front, way, beside in zip(paces, fronts, ways, rank.load, strict=True)
    ]


def _lowered(
    fast: Sequence[float], slow: Sequence[float], fits: Callable[[Sequence[float]], bool]
) -> list[float]:
    """Return the lowest paces between two, all at the same share of the way, that fit."""
    low, high = 0.0, 1.0
    for _ in range(_PACE_HALVINGS):
        middle = (low + high) / 2
        tried = [a + middle * (b - a) for a, b in zip(fast, slow, strict=True)]
        low, high = (low, middle) if fits(tried) else (middle, high)
    return [a + high * (b - a) for a, b in zip(fast, slow, strict=True)]


def _lowered_by_one(
    fast: Sequence[float], paces: Sequence[float], fits: Callable[[Sequence[float]], bool]
) -> list[float]:
    """Return paces that fit, each lowered towards the fastest as far as the others allow."""
    lowest = list(paces)
    for chunk in range(len(lowest)):
        lowest = _lowered([*lowest[:chunk], fast[chunk], *lowest[chunk + 1 :]], lowest, fits)
    return lowest


def _delays(fronts: Sequence[_Front], rank: PacedRank, paces: Sequence[float]) -> list[Floats]:
    """Return by how much each way of each stage of a rank is slower than its pace."""
    return [
        np.maximum(np.array(front.times, dtype=np.float64) + beside - pace, 0.0)
        for front, pace, beside in zip(fronts, paces, rank.load, strict=True)
    ]


def _within(fronts: Sequence[_Front], rank: PacedRank, paces: Sequence[float]) -> list[int]:
    """Return the leanest way of each stage of a rank that takes no longer than its pace."""
    return [
        front.within(pace - beside)
        for front, pace, beside in zip(fronts, paces, rank.load, strict=True)
    ]


def _cheapest(fronts: Sequence[_Front], room: int, costs: Sequence[Floats]) -> list[int] | None:
    """Return a way for each stage of a rank that costs little, None if nothing fits.

    Args:
        fronts: of the stages.
        room: for all of them.
        costs: of each way of each stage; infinite where it may not be taken.
    """
    held = [
        np.where(np.isfinite(cost), np.array(front.held, dtype=np.float64), np.inf)
        for front, cost in zip(fronts, costs, strict=True)
    ]
    costs = [np.where(np.isfinite(cost), cost, 1e300) for cost in costs]

    def total(ways: Sequence[int]) -> float:
        return sum(float(own[way]) for own, way in zip(held, ways, strict=True))

    def priced(price: float) -> list[int]:
        return [int(np.argmin(c + price * h)) for c, h in zip(costs, held, strict=True)]

    ways = [int(np.argmin(own)) for own in held]
    if total(ways) > room:
        return None
    low, high = 0.0, 1.0
    while total(priced(high)) > room and high < _MOST_PRICE:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if total(priced(middle)) <= room else (middle, high)
    if total(priced(high)) <= room:
        ways = priced(high)
    for chunk in sorted(range(len(ways)), key=lambda c: -float(costs[c][ways[c]])):
        spare = room - total(ways) + held[chunk][ways[chunk]]
        fitting = np.nonzero(held[chunk] <= spare)[0]
        best = int(fitting[np.argmin(costs[chunk][fitting])])
        if costs[chunk][best] < costs[chunk][ways[chunk]]:
            ways[chunk] = best
    return ways


def _fronts(
    options: Sequence[BlockOption], usable: Sequence[int], ranks: Sequence[PacedRank]
) -> list[list[_Front]]:
    """Return the ways to run each stage of each rank."""
    most = max(size for rank in ranks for size in rank.sizes)
    by_live = {
        live: _grown(options, usable, live, most)
        for live in {live for rank in ranks for live in rank.live}
    }
    return [
        [by_live[live][size] for live, size in zip(rank.live, rank.sizes, strict=True)]
        for rank in ranks
    ]


def _grown(
    options: Sequence[BlockOption], usable: Sequence[int], live: float, most: int
) -> list[_Front]:
    """Return the ways to run 0 .. most blocks."""
    time = np.array([options[i].forward + options[i].backward for i in usable], dtype=np.int64)
    held = np.array(
        [math.ceil(options[i].static + live * options[i].kept) for i in usable], dtype=np.int64
    )
    fronts = [_Front([0], [0], [()])]
    for _ in range(most):
        last = fronts[-1]
        times = (np.array(last.times)[:, None] + time).ravel()
        needs = (np.array(last.held)[:, None] + held).ravel()
        kept = _pareto(times, needs)
        fronts.append(
            _Front(
                times[kept].tolist(),
                needs[kept].tolist(),
                [
                    (*last.options[int(k) // len(usable)], usable[int(k) % len(usable)])
                    for k in kept
                ],
            )
        )
    return fronts


def _pareto(times: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of what nothing beats, fastest first; of very many a sample."""
    order = np.lexsort((held, times))
    least = np.minimum.accumulate(held[order])
    is_leaner = np.ones(len(order), dtype=np.bool_)
    is_leaner[1:] = held[order][1:] < least[:-1]
    kept = order[is_leaner]
    if len(kept) > _MOST_POINTS:
        kept = kept[np.linspace(0, len(kept) - 1, _MOST_POINTS).round().astype(int)]
    return kept
