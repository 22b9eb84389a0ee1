"""Cut a chain into stages by dynamic programming, given the cost of every interval.

`time[s,i,j]` and `once[i,j]` are the costs of blocks i..j-1 as stage s, UNREACHABLE where they may
not be. The programme, over ends e[0] < e[1] < ... with e[-1] = 0 and e[S-1] = N:

    minimise  sum_s t[s] + weight * max_s t[s] + max_s once[s]        t[s] = time[s,e[s-1],e[s]]

Both maxima are thresholds: with `slowest` and `most_once` fixed, the sum alone is a shortest path
(_shortest). The least sum F falls as `slowest` grows, so an interval of thresholds between two
solved ones is skipped if weight * (its least threshold) + F(its greatest) is no better than the
best known, or if F is the same at both ends; else it is halved (_search_slowest).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNREACHABLE", "Partition", "best_partition"]

UNREACHABLE = 2**59
"""More ticks than any reachable cost; twice it still fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stage ends of the least objective (in ticks)."""

    objective: int
    ends: tuple[int, ...]


def best_partition(
    time: NDArray[np.int64], once: NDArray[np.int64], weight: int
) -> Partition | None:
    """Return the best partition, or None if no partition is reachable.

    Args:
        time: [stage, start, end] ticks per micro-batch.
        once: [start, end] ticks per step.
        weight: of the slowest stage, at least 0.

    Returns:
        The partition; of equal ones always the same.
    """
    least_sum = _shortest(time)
    if least_sum is None:
        return None
    least_slowest = _bottleneck(time)
    reachable = (time < UNREACHABLE).any(axis=0)
    best: Partition | None = None
    for most_once in np.unique(once[reachable]).tolist():
        floor = least_sum.objective + weight * least_slowest + most_once
        if best is not None and floor >= best.objective:
            break
        masked = np.where(once[None, :, :] <= most_once, time, UNREACHABLE)
        limit = None if best is None else best.objective - most_once
        found = _search_slowest(masked, weight, limit)
        if found is not None:
            best = Partition(objective=found.objective + most_once, ends=found.ends)
    return best


def _search_slowest(time: NDArray[np.int64], weight: int, limit: int | None) -> Partition | None:
    """Return the best partition without `once` that is below the limit, or None."""
    free = _shortest(time)
    if free is None:
        return None
    least = _bottleneck(time)
    tight = _shortest(np.where(time <= least, time, UNREACHABLE))
    assert tight is not None, "the bottleneck is reachable by definition"
    best: Partition | None = None
    best_objective = UNREACHABLE if limit is None else limit
    if tight.objective + weight * least < best_objective:
        best_objective = tight.objective + weight * least
        best = Partition(objective=best_objective, ends=tight.ends)
    values = np.unique(time[(time >= least) & (time < UNREACHABLE)])
    # Each entry: thresholds values[low] < threshold <= values[high], and F at both.
    open_ranges = [(0, len(values) - 1, tight.objective, free.objective)]
    while open_ranges:
        low, high, sum_low, sum_high = open_ranges.pop()
        if low >= high or sum_low == sum_high:
            continue
        if weight * int(values[low + 1]) + sum_high >= best_objective:
            continue
        middle = (low + high + 1) // 2
        found = _shortest(np.where(time <= values[middle], time, UNREACHABLE))
        assert found is not None, "a greater threshold keeps every partition"
        if found.objective + weight * int(values[middle]) < best_objective:
            best_objective = found.objective + weight * int(values[middle])
            best = Partition(objective=best_objective, ends=found.ends)
        if middle < high:
            open_ranges.append((middle, high, found.objective, sum_high))
        open_ranges.append((low, middle - 1, sum_low, found.objective))
    return best


def _shortest(time: NDArray[np.int64]) -> Partition | None:
    """Return the partition of least sum of times, or None."""
    num_stages, size = time.shape[0], time.shape[1]
    reach = np.full(size, UNREACHABLE, dtype=np.int64)
    reach[0] = 0
    origins = []
    for stage in range(num_stages):
        total = reach[:, None] + time[stage]
        origin = total.argmin(axis=0)
        reach = np.minimum(total[origin, np.arange(size)], UNREACHABLE)
        origins.append(origin)
    if reach[-1] >= UNREACHABLE:
        return None
    ends = [size - 1]
    for origin in reversed(origins[1:]):
        ends.append(int(origin[ends[-1]]))
    return Partition(objective=int(reach[-1]), ends=tuple(reversed(ends)))


def _bottleneck(time: NDArray[np.int64]) -> int:
    """Return the least possible time of the slowest stage."""
    reach = np.full(time.shape[1], UNREACHABLE, dtype=np.int64)
    reach[0] = 0
    for stage in time:
        reach = np.maximum(reach[:, None], stage).min(axis=0)
    return int(reach[-1])
