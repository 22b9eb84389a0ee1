"""Cut a chain into stages by dynamic programming, given the cost of every interval.

`time[s,i,j]` and `once[i,j]` are the costs of blocks i..j-1 as stage s, UNREACHABLE where they may
not be. Single intervals have further columns: pairs of time and once to choose from. The programme,
over ends e[0] < e[1] < ... with e[-1] = 0 and e[S-1] = N, and one column per stage:

    minimise  sum_s t[s] + weight * max_s t[s] + max_s once[s]        t[s] = time[s,e[s-1],e[s]]

Both maxima are thresholds: with `slowest` and `most_once` fixed, the sum alone is a shortest path
(_shortest). What remains, F, falls as a threshold grows, so of the thresholds between two solved
ones only the better half-open ranges are split (_best_threshold): a range (low, high] is dropped if
weight * (its least threshold) + F(high) is no better than the best known, or if F(low) == F(high).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNREACHABLE", "Columns", "Partition", "best_partition"]

UNREACHABLE = 2**59
"""More ticks than any reachable cost; twice it still fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stage ends of the least objective (in ticks), and the threshold that it was found under."""

    objective: int
    ends: tuple[int, ...]
    threshold: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Further columns: blocks start..end-1 as a stage, at this time and once; equally long."""

    stage: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    time: NDArray[np.int64]
    once: NDArray[np.int64]

    def least(
        self, cost: NDArray[np.int64], own: NDArray[np.int64], most_once: int | None
    ) -> NDArray[np.int64]:
        """Return `cost` lowered to `own` of the columns whose once is within the threshold."""
        fits = slice(None) if most_once is None else self.once <= most_once
        places = (self.stage[fits], self.start[fits], self.end[fits])
        np.minimum.at(cost, places, own[fits])
        return cost


def best_partition(
    time: NDArray[np.int64], once: NDArray[np.int64], columns: Columns, weight: int
) -> Partition | None:
    """Return the best partition, or None if no partition is reachable.

    Args:
        time: [stage, start, end] ticks per micro-batch.
        once: [start, end] ticks per step.
        columns: further ones.
        weight: of the slowest stage, at least 0.

    Returns:
        The partition, with the threshold of `once`; of equal ones always the same.
    """
    least_once = np.where(time < UNREACHABLE, once[None], UNREACHABLE)
    values = _values_from_bottleneck(columns.least(least_once, columns.once, None), columns.once)

    def solve(most_once: int) -> Partition:
        masked = np.where(once[None] <= most_once, time, UNREACHABLE)
        return _best_sum_and_slowest(columns.least(masked, columns.time, most_once), weight)

    return _best_threshold(values, 1, solve)


def _best_sum_and_slowest(time: NDArray[np.int64], weight: int) -> Partition:
    """Return the best partition without `once` of a reachable chain."""
    values = _values_from_bottleneck(time, time[:0])

    def solve(slowest: int) -> Partition:
        return _shortest(np.where(time <= slowest, time, UNREACHABLE))

    best = _best_threshold(values, weight, solve)
    assert best is not None, "the bottleneck is reachable by definition"
    return best


def _values_from_bottleneck(cost: NDArray[np.int64], more: NDArray[np.int64]) -> list[int]:
    """Return the thresholds that matter, ascending: none below what every partition reaches.

    Args:
        cost: [stage, start, end], UNREACHABLE where a stage may not be.
        more: further costs, in any shape.

    Returns:
        All reachable costs from the least possible maximum over a partition's stages; empty if
        no partition is reachable.
    """
    reach = np.full(cost.shape[1], UNREACHABLE, dtype=np.int64)
    reach[0] = 0
    for stage in cost:
        reach = np.maximum(reach[:, None], stage).min(axis=0)
    every = np.unique(np.concatenate([cost.ravel(), more.ravel()]))
    values: list[int] = every[(every >= reach[-1]) & (every < UNREACHABLE)].tolist()
    return values


def _best_threshold(
    values: Sequence[int], weight: int, solve: Callable[[int], Partition]
) -> Partition | None:
    """Return the partition of least weight * threshold + solve(threshold).objective.

    Args:
        values: thresholds in ascending order.
        weight: at least 0.
        solve: its objective never grows with the threshold.
    """
    best: Partition | None = None

    def price(index: int) -> int:
        nonlocal best
        found = solve(values[index])
        total = weight * values[index] + found.objective
        if best is None or total < best.objective:
            best = Partition(objective=total, ends=found.ends, threshold=values[index])
        return found.objective

    if not values:
        return None
    last = len(values) - 1
    open_ranges = [(0, last, price(0), price(last))]
    while open_ranges:
        low, high, rest_low, rest_high = open_ranges.pop()
        assert best is not None
        if high - low <= 1 or rest_low == rest_high:
            continue
        if weight * values[low + 1] + rest_high >= best.objective:
            continue
        middle = (low + high) // 2
        rest_middle = price(middle)
        open_ranges.append((middle, high, rest_middle, rest_high))
        open_ranges.append((low, middle, rest_low, rest_middle))
    return best


def _shortest(time: NDArray[np.int64]) -> Partition:
    """Return the partition of least sum of times of a reachable chain."""
    num_stages, size = time.shape[0], time.shape[1]
    reach = np.full(size, UNREACHABLE, dtype=np.int64)
    reach[0] = 0
    origins = []
    for stage in range(num_stages):
        total = reach[:, None] + time[stage]
        origin = total.argmin(axis=0)
        reach = np.minimum(total[origin, np.arange(size)], UNREACHABLE)
        origins.append(origin)
    assert reach[-1] < UNREACHABLE, "no partition is reachable"
    ends = [size - 1]
    for origin in reversed(origins[1:]):
        ends.append(int(origin[ends[-1]]))
    return Partition(objective=int(reach[-1]), ends=tuple(reversed(ends)), threshold=UNREACHABLE)
