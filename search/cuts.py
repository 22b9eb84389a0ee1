"""All ways to cut a chain that may be fast enough, for times that no sum over stages tells."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autoplan.search.columns import StageTable
from autoplan.search.partition import UNREACHABLE
from autoplan.search.problem import PipelineProblem

__all__ = ["cuts_within"]


def cuts_within(
    problem: PipelineProblem, table: StageTable, limit: int, most: int
) -> list[tuple[int, ...]] | None:
    """Return stage ends of every solution whose objective may be within a limit.

    Stage by stage, no further than where what follows takes too long at the least.

    Args:
        problem: what is cut.
        table: the bounds of its stages.
        limit: ticks.
        most: so many at most; None if there are more.
    """
    weight = problem.num_microbatches - 1
    room = limit - problem.constant - int(table.once[0, -1]) // problem.num_stages
    rest, peak = _at_the_least(table.time)
    if rest[0, 0] >= UNREACHABLE:
        return []

    def ends_from(
        stage: int, start: int, total: int, slowest: int, before: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        if stage == problem.num_stages:
            yield before
            return
        times = table.time[stage, start]
        sums = total + times + rest[stage + 1]
        paces = np.maximum(np.maximum(slowest, times), peak[stage + 1])
        reachable = np.nonzero((sums < UNREACHABLE) & (paces < UNREACHABLE))[0]
        for end in reachable[sums[reachable] + weight * paces[reachable] <= room].tolist():
            time = int(times[end])
            yield from ends_from(stage + 1, end, total + time, max(slowest, time), (*before, end))

    found: list[tuple[int, ...]] = []
    for ends in ends_from(0, 0, 0, 0, ()):
        found.append(ends)
        if len(found) > most:
            return None
    return found


def _at_the_least(time: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return [stage, start] the least sum and the least maximum of this stage and all after it."""
    num_stages, size = time.shape[0], time.shape[1]
    rest = np.full((num_stages + 1, size), UNREACHABLE, dtype=np.int64)
    peak = rest.copy()
    rest[-1, -1] = peak[-1, -1] = 0
    for stage in reversed(range(num_stages)):
        rest[stage] = np.minimum((time[stage] + rest[stage + 1]).min(axis=1), UNREACHABLE)
        peak[stage] = np.maximum(time[stage], peak[stage + 1]).min(axis=1)
    return rest, peak
