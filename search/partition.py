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
from dataclasses import dataclass, replace

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
    least = _bottleneck(columns.least(least_once, columns.once, None))
    if least >= UNREACHABLE:
        return None

    def solve(most_once: int) -> Partition:
        masked = np.where(once[None] <= most_once, time, UNREACHABLE)
        return _best_sum_and_slowest(columns.least(masked, columns.time, most_once), weight)

    is_used = (time < UNREACHABLE).any(axis=0)
    return _best_over([once[is_used], columns.once], least, 1, solve)


def _best_sum_and_slowest(time: NDArray[np.int64], weight: int) -> Partition:
    """Return the best partition without `once` of a reachable chain."""

    def solve(slowest: int) -> Partition:
        return _shortest(np.where(time <= slowest, time, UNREACHABLE))

    return _best_over([time.ravel()], _bottleneck(time), weight, solve)


def _bottleneck(cost: NDArray[np.int64]) -> int:
    """Return the least possible maximum over a partition's stages; UNREACHABLE if there is none."""
    reach = np.full(cost.shape[1], UNREACHABLE, dtype=np.int64)
    reach[0] = 0
    for stage in cost:
        reach = np.maximum(reach[:, None], stage).min(axis=0)
    return int(reach[-1])


def _best_over(
    costs: Sequence[NDArray[np.int64]],
    least: int,
    weight: int,
    solve: Callable[[int], Partition],
) -> Partition:
    """Return the partition of least weight * threshold + solve(threshold).objective.

    Args:
        costs: among them are all thresholds that may matter.
        least: the least threshold under which there is a partition.
        weight: at least 0.
        solve: its objective never grows with the threshold.
    """
    known: dict[int, Partition] = {}

    def solved(threshold: int) -> Partition:
        if threshold not in known:
            known[threshold] = solve(threshold)
        return known[threshold]

    tight, loose = solved(least), solved(UNREACHABLE - 1)
    most = least
    if weight and tight.objective > loose.objective:
        # Above this even the least objective would cost more than the tightest threshold.
        most += (tight.objective - loose.objective) // weight
    elif not weight:
        return replace(loose, threshold=UNREACHABLE - 1)
    every = [own[(own >= least) & (own <= most)] for own in costs]
    values: list[int] = np.unique(np.concatenate(every)).tolist()
    best = _best_threshold(values, weight, solved)
    assert best is not None, "the bottleneck is a threshold"
    return best


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
