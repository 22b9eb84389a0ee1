"""The Pareto frontier of level 1: from the fastest choice down to the one of least memory.

Where few values cross any point of a block, all of its undominated points follow from the
elimination of its ops (elimination.py, labels.py), and a sample of them is taken: between two
neighbouring points of the sample lies a rectangle in which further points may hide. The largest one
is split at half its memory, until there are enough points or every rectangle is empty:

    limit = (floor + upper.memory) // 2      floor: no point is known or possible at or below it
                                             that `lower` does not already stand for
    new   = fastest(limit)                   fastest, then least memory: on the frontier

What the planner takes is not a sample of so many points but a cover: few points such that for every
point of the frontier there is one that is no larger and at most a given share slower. A mix of
blocks then loses no more than that share either, whatever the limit on their total.

A block that is too wide for that is solved by CP-SAT once per limit (choice.py).
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autoplan.search.choice import (
    build_choice_model,
    minimize_built_memory,
    prefer_small_indices,
    solve_built,
)
from autoplan.search.elimination import Costs, Elimination, Structure, eliminate, structure_of
from autoplan.search.evaluate import verify_choice_problem
from autoplan.search.fixing import fix, with_fixed
from autoplan.search.labels import Label, TooManyLabelsError, fastest, pareto, supported
from autoplan.search.problem import ChoiceProblem, ChoiceSolution

__all__ = [
    "Eliminations",
    "choice_frontier",
    "covering_points",
    "fastest_choice",
    "frontier_cover",
    "whole_frontier",
]

_Fastest = Callable[[int, ChoiceSolution], ChoiceSolution | None]

_FREE: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True)
class Eliminations:
    """Steps by structure: problems that differ in costs only share them, and what is fixed too."""

    _known: dict[Structure, Elimination | None] = field(default_factory=dict)
    _fixed: dict[tuple[int, tuple[tuple[int, int], ...]], Elimination] = field(default_factory=dict)
    _posed: dict[int, tuple[ChoiceProblem, Elimination | None, Costs | None]] = field(
        default_factory=dict
    )

    def of(self, problem: ChoiceProblem) -> Elimination | None:
        """Return the steps of a problem, or None if it is too wide."""
        structure = structure_of(problem)
        if structure not in self._known:
            self._known[structure] = eliminate(problem)
        return self._known[structure]

    def posed(
        self, problem: ChoiceProblem, fixed: Mapping[int, int] = _FREE
    ) -> tuple[Elimination, Costs] | None:
        """Return steps and costs of a problem, None if it is too wide.

        Args:
            problem: what to choose.
            fixed: op to the option that it must take, for ops that are settled.

        Raises:
            ValueError: if the problem is malformed.
        """
        if id(problem) not in self._posed:
            verify_choice_problem(problem)
            steps = self.of(problem)
            costs = None if steps is None else steps.costs(problem)
            self._posed[id(problem)] = (problem, steps, costs)
        _, steps, costs = self._posed[id(problem)]
        if steps is None or costs is None:
            if not fixed:
                return None
            alone = with_fixed(problem, fixed)
            own = self.of(alone)
            return None if own is None else (own, own.costs(alone))
        if fixed:
            key = (id(steps), tuple(sorted(fixed.items())))
            if key not in self._fixed:
                self._fixed[key] = fix(steps, fixed)
            steps = self._fixed[key]
        return steps, costs


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


def fastest_choice(
    problem: ChoiceProblem,
    *,
    time_limit_s: float,
    eliminations: Eliminations | None = None,
    fixed: Mapping[int, int] = _FREE,
) -> ChoiceSolution:
    """Return the fastest options; among equally fast ones, those of least memory.

    Statuses are those of `solve_choice`, which is asked where a block is too wide. `fixed`: see
    `Eliminations.posed`.

    Raises:
        ValueError: if the problem is malformed.
    """
    posed = (eliminations or Eliminations()).posed(problem, fixed)
    if posed is None:
        model = build_choice_model(with_fixed(problem, fixed))
        return solve_built(model, None, time_limit_s=time_limit_s, seed=0, hint=None)
    label = fastest(*posed)
    if label is None:
        return ChoiceSolution(status="infeasible", options=(), time=0, bound=0, memory=0)
    return _proven(problem, label, fixed)


def whole_frontier(
    problem: ChoiceProblem,
    *,
    eliminations: Eliminations | None = None,
    fixed: Mapping[int, int] = _FREE,
) -> tuple[ChoiceSolution, ...] | None:
    """Return the frontier from the fastest point to the leanest, each point proven.

    Where it has more points than can be enumerated, it is the supported ones: those that are
    cheapest for some price of memory. `fixed`: see `Eliminations.posed`.

    Returns:
        The points; empty if no options go together, None if the block is too wide.

    Raises:
        ValueError: if the problem is malformed.
    """
    posed = (eliminations or Eliminations()).posed(problem, fixed)
    if posed is None:
        return None
    try:
        labels = pareto(*posed)
    except TooManyLabelsError:
        labels = supported(*posed)
    return tuple(_proven(problem, label, None) for label in labels)


def _proven(
    problem: ChoiceProblem, label: Label, fixed: Mapping[int, int] | None
) -> ChoiceSolution:
    """Return a solution; `fixed` None: it may still be left out, so equal ones are not compared."""
    options = label.options
    if fixed is not None:
        options = prefer_small_indices(problem, options, fixed)
    return ChoiceSolution(
        status="optimal", options=options, time=label.time, bound=label.time, memory=label.memory
    )


def choice_frontier(
    problem: ChoiceProblem,
    *,
    points: int,
    time_limit_s: float,
    seed: int = 0,
    eliminations: Eliminations | None = None,
    fixed: Mapping[int, int] = _FREE,
) -> tuple[ChoiceSolution, ...]:
    """Return Pareto points by descending memory, from the fastest to the least memory.

    Args:
        problem: what to choose.
        points: most points wanted; at least 2 unless one point dominates all.
        time_limit_s: wall-clock seconds for all calls of CP-SAT together.
        seed: of the solver.
        eliminations: steps that are known from problems before this one.
        fixed: see `Eliminations.posed`.

    Returns:
        Solutions of which none dominates another. A point whose status is "feasible" was not
        proven by the time limit. Empty if no options go together or none were found in time.

    Raises:
        ValueError: if the problem is malformed or `points` < 1.
    """
    if points < 1:
        raise ValueError(f"points is {points}: ask for at least 1")
    every = whole_frontier(problem, eliminations=eliminations, fixed=fixed)
    if every is None:
        return _frontier_by_cp_sat(with_fixed(problem, fixed), points, time_limit_s, seed)
    if not every:
        return ()

    def fastest(limit: int, start: ChoiceSolution) -> ChoiceSolution | None:
        return next((point for point in every if point.memory <= limit), None)

    chosen = _sample(every[0], every[-1], points, fastest, lambda: True)
    return tuple(
        _proven(problem, Label(time=p.time, memory=p.memory, options=p.options), fixed)
        for p in chosen
    )


def frontier_cover(
    problem: ChoiceProblem,
    *,
    tolerance: float,
    points: int,
    time_limit_s: float,
    eliminations: Eliminations | None = None,
    fixed: Mapping[int, int] = _FREE,
) -> tuple[ChoiceSolution, ...]:
    """Return Pareto points by descending memory that stand for all others within a tolerance.

    Args:
        problem: what to choose.
        tolerance: share of its time by which a point may be replaced by a slower one.
        points: of a block too wide for elimination, of which a sample is taken.
        time_limit_s: for that.
        eliminations: steps that are known from problems before this one.
        fixed: see `Eliminations.posed`.

    Returns:
        For every point of the frontier there is one of at most its memory and at most
        `1 + tolerance` times its time; both ends are there. As `choice_frontier` where the block is
        too wide. Of a frontier with too many points to enumerate, the supported ones are covered.

    Raises:
        ValueError: if the problem is malformed or the tolerance is negative.
    """
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}: use at least 0")
    every = whole_frontier(problem, eliminations=eliminations, fixed=fixed)
    if every is None:
        return choice_frontier(
            problem,
            points=points,
            time_limit_s=time_limit_s,
            eliminations=eliminations,
            fixed=fixed,
        )
    return tuple(
        _proven(problem, Label(time=p.time, memory=p.memory, options=p.options), fixed)
        for p in covering_points(every, tolerance)
    )


def covering_points(
    every: Sequence[ChoiceSolution], tolerance: float
) -> tuple[ChoiceSolution, ...]:
    """Return few points that cover a frontier (fastest first) within a tolerance, ends included.

    The first point that is not covered yet is covered by the leanest that is allowed to.
    """
    chosen = list(every[:1])
    last = 0
    for first, point in enumerate(every):
        if point.memory >= chosen[-1].memory:
            continue
        last = max(last, first)
        while last + 1 < len(every) and every[last + 1].time <= point.time * (1 + tolerance):
            last += 1
        chosen.append(every[last])
    return tuple(chosen)


def _sample(
    fastest: ChoiceSolution,
    leanest: ChoiceSolution,
    points: int,
    solve: _Fastest,
    may_go_on: Callable[[], bool],
) -> tuple[ChoiceSolution, ...]:
    """Split the largest rectangle between neighbours until there are enough points."""
    if points == 1 or leanest.memory >= fastest.memory:
        return (fastest,)
    found = [fastest, leanest]
    gaps = [_Gap(floor=leanest.memory, lower=leanest, upper=fastest)]
    while len(found) < points and may_go_on():
        gap = max(gaps, key=lambda gap: gap.area)
        if gap.area <= 0:
            break
        gaps.remove(gap)
        limit = (gap.floor + gap.upper.memory) // 2
        point = solve(limit, gap.lower)
        if point is None or point.time >= gap.lower.time:
            gaps.append(_Gap(floor=limit, lower=gap.lower, upper=gap.upper))
            continue
        found.append(point)
        gaps.append(_Gap(floor=gap.floor, lower=gap.lower, upper=point))
        gaps.append(_Gap(floor=limit, lower=point, upper=gap.upper))
    return _undominated(found)


def _frontier_by_cp_sat(
    problem: ChoiceProblem, points: int, time_limit_s: float, seed: int
) -> tuple[ChoiceSolution, ...]:
    """Return the frontier of a block that is too wide for elimination."""
    deadline = clock.monotonic() + time_limit_s
    built = build_choice_model(problem)

    def left_s() -> float:
        return max(deadline - clock.monotonic(), 0.0)

    def solve(limit: int | None, start: ChoiceSolution | None) -> ChoiceSolution | None:
        hint = None if start is None else start.options
        solution = solve_built(built, limit, time_limit_s=left_s(), seed=seed, hint=hint)
        return solution if solution.options else None

    fastest = solve(None, None)
    if fastest is None:
        return ()
    leanest = minimize_built_memory(built, time_limit_s=left_s(), seed=seed, hint=fastest.options)
    if points == 1 or not leanest.options:
        return (fastest,)
    return _sample(fastest, _with_time_bound(leanest), points, solve, lambda: left_s() > 0)


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


def _undominated(found: Sequence[ChoiceSolution]) -> tuple[ChoiceSolution, ...]:
    """Return the points that no other equals or beats in both, by descending memory."""
    left: list[ChoiceSolution] = []
    for point in sorted(found, key=lambda point: (point.time, point.memory)):
        if not left or point.memory < left[-1].memory:
            left.append(point)
    return tuple(left)
