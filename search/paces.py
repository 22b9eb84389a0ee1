"""Options of stages under common paces, where ranks have several stages.

All ranks run their c-th stages at the same time, so a step goes by the pace[c] of the slowest.
Within a pace a stage takes the leanest options; what a rank needs is the sum over its stages:

    minimise   sum_c pace[c]
    subject to sum_c held[r,c](pace[c] - load[r,c]) <= room[r]
    with       held[r,c](t) the least that size[r,c] blocks hold which take no longer than t

The paces of equal stages are lowered together as far as all ranks allow, then one after the other.
That is a heuristic for what the bound of the ranks' shares leaves open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import BlockOption

__all__ = ["PacedRank", "paced_options"]

_HALVINGS = 14
_MOST_POINTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedRank:
    """A rank of several stages.

    Attributes:
        sizes: blocks of each stage.
        load: ticks that each stage has besides.
        live: micro-batches that a block keeps.
        room: memory units for what the blocks hold.
    """

    sizes: tuple[int, ...]
    load: tuple[int, ...]
    live: int
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

    def places(paces: Sequence[float]) -> list[list[int]] | None:
        """Return the way of each stage under these paces, None if a rank has too little room."""
        found = []
        for own, rank in zip(fronts, ranks, strict=True):
            ways = [
                front.within(pace - beside)
                for front, pace, beside in zip(own, paces, rank.load, strict=True)
            ]
            if min(ways) < 0:
                return None
            if sum(f.held[w] for f, w in zip(own, ways, strict=True)) > rank.room:
                return None
            found.append(ways)
        return found

    fast, slow = (
        [
            max(
                float(own[c].times[end] + rank.load[c])
                for own, rank in zip(fronts, ranks, strict=True)
            )
            for c in range(len(ranks[0].sizes))
        ]
        for end in (0, -1)
    )
    if places(slow) is None:
        return None
    paces = _lowered(fast, slow, places)
    for chunk in range(len(paces)):
        own_fast = [*paces[:chunk], fast[chunk], *paces[chunk + 1 :]]
        paces = _lowered(own_fast, paces, places)
    ways = places(paces)
    assert ways is not None, "paces were lowered to where nothing fits"
    return [
        [sorted(front.options[way]) for front, way in zip(own, found, strict=True)]
        for own, found in zip(fronts, ways, strict=True)
    ]


def _lowered(
    fast: Sequence[float], slow: Sequence[float], places: Callable[[Sequence[float]], object]
) -> list[float]:
    """Return the lowest paces between two, all at the same share of the way, that fit."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = [a + middle * (b - a) for a, b in zip(fast, slow, strict=True)]
        if places(tried) is None:
            low = middle
        else:
            high = middle
    return [a + high * (b - a) for a, b in zip(fast, slow, strict=True)]


def _fronts(
    options: Sequence[BlockOption], usable: Sequence[int], ranks: Sequence[PacedRank]
) -> list[list[_Front]]:
    """Return the ways to run each stage of each rank."""
    most = max(size for rank in ranks for size in rank.sizes)
    by_live = {}
    for live in {rank.live for rank in ranks}:
        by_live[live] = _grown(options, usable, live, most)
    return [[by_live[rank.live][size] for size in rank.sizes] for rank in ranks]


def _grown(
    options: Sequence[BlockOption], usable: Sequence[int], live: int, most: int
) -> list[_Front]:
    """Return the ways to run 0 .. most blocks."""
    time = np.array([options[i].forward + options[i].backward for i in usable], dtype=np.int64)
    held = np.array([options[i].static + live * options[i].kept for i in usable], dtype=np.int64)
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
