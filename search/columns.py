"""What is known of the stages that were looked at: exact columns and bounds between them.

The cost of a stage is a pair: ticks per micro-batch (time) and ticks per step (once). Its columns
cover all its solutions: an exact column is a solution; a region stands for every solution whose
once lies in least_once..most_once, and its time is a lower bound of theirs. At first a stage is one
region. Refining a region under a limit T (all of it at first, then its middle) finds its fastest
solution with once <= T, and leaves

    least_once .. once - 1      no faster than that solution
    T + 1 .. most_once          as it was

Solutions in between cost more of both. Where prices alone do not prove a solution the first time,
least_once .. T is no faster than they say: often more than cuts want to pay. Only a region that
they ask for again is solved by CP-SAT. So with options that do not differ in `once` each stage is
solved once, and with others the regions that cuts ask for are halved until they cost too much.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.search.detours import least_once
from autoplan.search.evaluate import rounded_up
from autoplan.search.partition import UNREACHABLE, Columns
from autoplan.search.problem import SLOWNESS_UNIT, PipelineProblem, Run
from autoplan.search.stage import StageSolution, solve_stage, stage_by_prices

__all__ = ["Column", "KnownStages", "StageKey", "StageTable", "stage_runs"]

StageKey = tuple[int, int, tuple[int, ...]]
"""What the columns of a stage depend on: live, room, number of blocks of each run."""

KnownStages = dict[tuple[StageKey, int], StageSolution]
"""Solved stages by key and limit of `once`; problems that differ in capacities only share them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A solution, with its `counts` per run and option, or a region, which has none.

    Attributes:
        time: ticks without the borders; of a region a lower bound.
        least_once: ticks; of a solution its own.
        most_once: ticks; of a solution its own.
        is_priced: prices tell no more about this region.
    """

    time: int
    least_once: int
    most_once: int
    counts: tuple[tuple[int, ...], ...] = ()
    is_priced: bool = False


class StageTable:
    """The costs of all intervals as all stages, sharpened where a cut needs them.

    Attributes:
        time: [stage, start, end] lower bounds in ticks, borders included; UNREACHABLE where the
            cuts or the memory forbid the stage, and where columns have taken its place.
        once: [start, end] least ticks per step.
        num_solved: calls of CP-SAT and of what spares it.
    """

    def __init__(
        self, problem: PipelineProblem, time: NDArray[np.int64], known: KnownStages | None = None
    ):
        self.problem = problem
        self.known = {} if known is None else known
        self.time = time
        self.once = _interval_once(problem)
        self.num_solved = 0
        self._columns: dict[StageKey, list[Column]] = {}
        self._places: dict[StageKey, list[tuple[int, int, int]]] = {}

    def key(self, place: tuple[int, int, int]) -> StageKey:
        """Return the key of a (stage, start, end), which gets columns if it had none."""
        stage, start, end = place
        counts, first = [], 0
        for run in self.problem.runs:
            counts.append(max(0, min(end, first + run.count) - max(start, first)))
            first += run.count
        room = self.problem.capacity[stage] - self.problem.fixed[stage]
        key = (self.problem.live[stage], room, tuple(counts))
        if key not in self._columns:
            self._replace_by_region(key, place)
        return key

    def columns(self) -> Columns:
        """Return every column at every place, as the cut programme takes them."""
        rows = [
            (
                *place,
                self.problem.on_stage(column.time, place[0]) + self.problem.border(*place),
                column.least_once,
            )
            for key, places in self._places.items()
            for place in places
            for column in self._columns[key]
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return Columns(stage=table[0], start=table[1], end=table[2], time=table[3], once=table[4])

    def chosen(self, key: StageKey, most_once: int) -> Column:
        """Return the column of least time within the threshold; of equal ones a solution."""
        fitting = (column for column in self._columns[key] if column.least_once <= most_once)
        return min(fitting, key=lambda column: (column.time, not column.counts, column.least_once))

    def solution(self, key: StageKey, most_once: int) -> Column | None:
        """Return the fastest solution known, within the threshold if there is one."""
        solutions = [column for column in self._columns[key] if column.counts]
        return min(
            solutions,
            key=lambda column: (column.least_once > most_once, column.time, column.least_once),
            default=None,
        )

    def refine(
        self, key: StageKey, region: Column, *, deadline: float, seed: int, workers: int
    ) -> None:
        """Put the fastest solution of (half) a region, and what is left of it, in its place."""
        self.num_solved += 1
        limit = region.most_once
        if not region.is_priced and any(column.counts for column in self._columns[key]):
            half = (region.least_once + region.most_once) // 2
            limit = half - half % self.problem.once_grain
        found = self._priced(key, limit)
        if region.is_priced and found.status not in ("optimal", "infeasible"):
            found = self._solved(key, limit, deadline=deadline, seed=seed, workers=workers)
        left = [column for column in self._columns[key] if column is not region]
        if limit < region.most_once:
            above = limit + self.problem.once_grain
            left.append(replace(region, least_once=above))
        self._columns[key] = left + self._below(region, limit, found)

    def _priced(self, key: StageKey, limit: int) -> StageSolution:
        """Return what is known of a stage with so many ticks of `once`, at the least by prices."""
        if (key, limit) not in self.known:
            live, room, counts = key
            runs = stage_runs(self.problem, counts)
            self.known[key, limit] = stage_by_prices(runs, live, room, limit, self.problem.grain)
        return self.known[key, limit]

    def _solved(
        self, key: StageKey, limit: int, *, deadline: float, seed: int, workers: int
    ) -> StageSolution:
        """Return the solution of a stage with so many ticks of `once`, as far as there is time."""
        live, room, counts = key
        found = solve_stage(
            stage_runs(self.problem, counts),
            live,
            room,
            limit,
            time_limit_s=max(deadline - clock.monotonic(), 0.0),
            seed=seed,
            workers=workers,
            grain=self.problem.grain,
        )
        if found.status in ("optimal", "infeasible"):
            self.known[key, limit] = found
        return found

    def _below(self, region: Column, limit: int, found: StageSolution) -> list[Column]:
        """Return the columns of a region up to a limit, under which this was found."""
        grain, once_grain = self.problem.grain, self.problem.once_grain
        is_settled = found.status in ("optimal", "infeasible")
        if found.status == "infeasible":
            return []
        time = max(region.time, rounded_up(found.bound, grain))
        rest = Column(
            time=time,
            least_once=region.least_once,
            most_once=limit,
            is_priced=not is_settled,
        )
        if not found.counts or not (is_settled or region.is_priced):
            return [rest]
        once = rounded_up(found.once, once_grain)
        solution = Column(
            time=rounded_up(found.time, grain),
            least_once=once,
            most_once=once,
            counts=found.counts,
        )
        if is_settled:
            rest = replace(rest, most_once=once - once_grain)
        return [solution, rest] if rest.least_once <= rest.most_once else [solution]

    def _replace_by_region(self, key: StageKey, place: tuple[int, int, int]) -> None:
        """Give a stage its first column, wherever blocks of these counts may lie."""
        _, start, end = place
        counts = key[2]
        places = [
            (same, first, first + end - start)
            for same in range(self.problem.num_stages)
            if self.problem.live[same] == key[0]
            and self.problem.capacity[same] - self.problem.fixed[same] == key[1]
            for first in _shifted_starts(self.problem, counts, start)
        ]
        self._columns[key] = [
            Column(
                time=self._own_time(place),
                least_once=int(self.once[start, end]),
                most_once=rounded_up(
                    sum(
                        count * max(option.once for option in run.options)
                        for run, count in zip(self.problem.runs, counts, strict=True)
                    ),
                    self.problem.once_grain,
                ),
            )
        ]
        self._places[key] = [own for own in places if self.time[own] < UNREACHABLE]
        for own in self._places[key]:
            self.time[own] = UNREACHABLE

    def _own_time(self, place: tuple[int, int, int]) -> int:
        """Return ticks of the options' device that take no longer than a stage's on its own."""
        own = int(self.time[place]) - self.problem.border(*place)
        if not self.problem.slowness:
            return own
        return max(0, own - 1) * SLOWNESS_UNIT // self.problem.slowness[place[0]]


def stage_runs(problem: PipelineProblem, counts: Sequence[int]) -> list[Run]:
    """Return the runs of a stage that has `counts` blocks of each run of the problem."""
    return [
        replace(run, count=count) for run, count in zip(problem.runs, counts, strict=True) if count
    ]


def _interval_once(problem: PipelineProblem) -> NDArray[np.int64]:
    """Return [start, end] least ticks per step of blocks start..end-1."""
    least = [own for run in problem.runs for own in (least_once(run),) * run.count]
    prefix = np.concatenate([[0], np.cumsum(np.array(least, dtype=np.int64))])
    sums = prefix[None, :] - prefix[:, None]
    return np.asarray(rounded_up(sums, problem.once_grain), dtype=np.int64)


def _shifted_starts(problem: PipelineProblem, counts: Sequence[int], start: int) -> range:
    """Return where an interval of these counts may start: all over a run if it lies in one."""
    used = [index for index, count in enumerate(counts) if count]
    if len(used) != 1:
        return range(start, start + 1)
    first = sum(run.count for run in problem.runs[: used[0]])
    return range(first, first + problem.runs[used[0]].count - counts[used[0]] + 1)
