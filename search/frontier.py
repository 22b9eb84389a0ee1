"""The Pareto frontier of level 1: from the fastest choice down to the one of least memory.

Between two neighbouring points lies a rectangle in which further points may hide. The largest one
is split at half its memory, until there are enough points or every rectangle is empty:

    limit = (floor + upper.memory) // 2      floor: no point is known or possible at or below it
                                             that `lower` does not already stand for
    new   = solve_choice(limit)              fastest, then least memory: on the frontier
"""

from __future__ import annotations

import time as clock
from dataclasses import dataclass

from autoplan.search.choice import (
    ChoiceModel,
    build_choice_model,
    minimize_built_memory,
    solve_built,
)
from autoplan.search.problem import ChoiceProblem, ChoiceSolution

__all__ = ["choice_frontier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Memory limits in `floor < limit < upper.memory` that are not explored yet."""

    floor: int
    lower: ChoiceSolution
    upper: ChoiceSolution

    @property
    def area(self) -> int:
        """Return the unexplored ticks times units; 0 if no limit is left between the ends."""
        height = max(self.upper.memory - self.floor - 1, 0)
        return height * (self.lower.time - self.upper.time)


def choice_frontier(
    problem: ChoiceProblem, *, points: int, time_limit_s: float, seed: int = 0
) -> tuple[ChoiceSolution, ...]:
    """Return Pareto points by descending memory, from the fastest to the least memory.

    Args:
        problem: what to choose.
        points: most points wanted; at least 2 unless one point dominates all.
        time_limit_s: wall-clock seconds for all solves together.
        seed: of the solver.

    Returns:
        Solutions of which none dominates another. A point whose status is "feasible" was not
        proven by the time limit. Empty if no options go together or none were found in time.

    Raises:
        ValueError: if the problem is malformed or `points` < 1.
    """
    if points < 1:
        raise ValueError(f"points is {points}: ask for at least 1")
    deadline = clock.monotonic() + time_limit_s
    built = build_choice_model(problem)
    fastest = _solve(built, None, deadline, seed, None)
    if fastest is None:
        return ()
    leanest = minimize_built_memory(
        built,
        time_limit_s=max(deadline - clock.monotonic(), 0.0),
        seed=seed,
        hint=fastest.options,
    )
    if points == 1 or not leanest.options:
        return (fastest,)
    found = [fastest, _with_time_bound(leanest)]
    gaps = [_Gap(floor=leanest.memory, lower=found[1], upper=fastest)]
    while len(found) < points and clock.monotonic() < deadline:
        gap = max(gaps, key=lambda gap: gap.area)
        if gap.area <= 0:
            break
        gaps.remove(gap)
        limit = (gap.floor + gap.upper.memory) // 2
        point = _solve(built, limit, deadline, seed, gap.lower)
        if point is None or point.time >= gap.lower.time:
            gaps.append(_Gap(floor=limit, lower=gap.lower, upper=gap.upper))
            continue
        found.append(point)
        gaps.append(_Gap(floor=gap.floor, lower=gap.lower, upper=point))
        gaps.append(_Gap(floor=limit, lower=point, upper=gap.upper))
    return _undominated(found)


def _solve(
    built: ChoiceModel,
    limit: int | None,
    deadline: float,
    seed: int,
    start: ChoiceSolution | None,
) -> ChoiceSolution | None:
    """Return the fastest point under a limit, or None if there is none in time."""
    solution = solve_built(
        built,
        limit,
        time_limit_s=max(deadline - clock.monotonic(), 0.0),
        seed=seed,
        hint=None if start is None else start.options,
    )
    return solution if solution.options else None


def _with_time_bound(leanest: ChoiceSolution) -> ChoiceSolution:
    """Return the least-memory point with a bound of its time in place of its memory.

    The fastest among the points of proven least memory is the fastest under that limit, unless
    breaking the tie ran into its allowance, so no more than 0 is claimed.
    """
    return ChoiceSolution(
        status=leanest.status,
        options=leanest.options,
        time=leanest.time,
        bound=0,
        memory=leanest.memory,
    )


def _undominated(found: list[ChoiceSolution]) -> tuple[ChoiceSolution, ...]:
    """Return the points that no other equals or beats in both, by descending memory."""
    left: list[ChoiceSolution] = []
    for point in sorted(found, key=lambda point: (point.time, point.memory)):
        if not left or point.memory < left[-1].memory:
            left.append(point)
    return tuple(left)
