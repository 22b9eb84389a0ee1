"""Level 2: cut a chain of blocks into stages and choose an option for every block.

The programme, over stage ends e[s] and the options of the blocks between them:

    minimise    sum_s t[s] + (num_microbatches - 1) max_s t[s] + max_s once[s] + constant
    with        t[s] = boundary[s] + sum (forward + backward) of the blocks of stage s
                       + crossing of the cuts before and after it
    subject to  the memory of every stage, the allowed cuts, `together`, `min_blocks`, `anchors`

Within a stage only the least time matters once the cuts are known, so the programme falls apart:

    1. bound every interval of blocks as every stage, by a relaxation          stage.py
       without whole numbers                                                   _interval_bounds
    2. cut the chain at the least objective under these bounds                 partition.py
       which is a lower bound of the whole
    3. solve the stages of that answer exactly by CP-SAT, where they           stage.py
       have not been; if none was left, the answer is optimal                  columns.py
       else go to 2 with the exact costs                                       _cut_by_bounds

Few stages are ever solved. Where options of one block differ in `once`, a stage has several
columns, a trade-off of time and once, of which only those that the cuts ask for are solved.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoplan.search.columns import KnownStages, StageTable, stage_runs
from autoplan.search.cuts import cuts_within
from autoplan.search.detours import hands_over, kept_options
from autoplan.search.evaluate import (
    cut_positions,
    option_numbers,
    pipeline_objective,
    rounded_up,
    stage_costs,
    verify_pipeline_problem,
)
from autoplan.search.partition import UNREACHABLE, best_partition
from autoplan.search.problem import (
    SLOWNESS_UNIT,
    BlockOption,
    PipelineProblem,
    PipelineSolution,
    Status,
)
from autoplan.search.stage import stage_time_bounds, stage_working

__all__ = ["cuts_below", "relaxed_bound", "solve_pipeline"]


@dataclass(slots=True, kw_only=True)
class _Search:
    """What is known while the search runs.

    Attributes:
        problem: with dominated options removed.
        original: per run the original index of every option left.
        best: the best solution known.
        bound: no solution is below it.
    """

    problem: PipelineProblem
    original: tuple[tuple[int, ...], ...]
    table: StageTable
    deadline: float
    seed: int
    workers: int
    best: PipelineSolution | None = None
    bound: int = 0


def solve_pipeline(
    problem: PipelineProblem,
    *,
    cutoff: int | None = None,
    time_limit_s: float,
    seed: int = 0,
    workers: int = 1,
    log: Callable[[str], None] | None = None,
    known: KnownStages | None = None,
) -> PipelineSolution:
    """Return the cuts and options of least objective.

    Args:
        problem: what to cut and choose.
        cutoff: ticks; only solutions strictly below it are wanted.
        time_limit_s: wall-clock seconds.
        seed: of the solver.
        workers: threads of the solver.
        log: receives a line per round.
        known: stages solved before, of problems with the same runs, grains and slowness; those that
            are solved here are added.

    Returns:
        The solution. Its status is
        "optimal": `objective == bound`, below the cutoff;
        "feasible": the time limit came before the proof; below the cutoff, `bound` is proven;
        "infeasible": no solution at all, or none below the cutoff; no ends and options, objective
        0; `bound` is the cutoff (every solution is at or above it), or 0 if there was none;
        "unknown": the time limit came before any solution below the cutoff; no ends and options,
        objective 0, `bound` is proven.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify_pipeline_problem(problem)
    deadline = clock.monotonic() + time_limit_s
    search = _start(problem, deadline, seed, workers, known)
    if not _cut_by_bounds(search, cutoff, log):
        return _without_solution("infeasible", cutoff or 0)
    best = search.best
    if best is None or (cutoff is not None and best.objective >= cutoff):
        return _without_solution("unknown", search.bound)
    return _finish(search, best)


def relaxed_bound(problem: PipelineProblem) -> int | None:
    """Return ticks below which no solution is, or None if there is none: what a search starts with.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify_pipeline_problem(problem)
    table = _start(problem, 0.0, 0, 1, None).table
    columns, weight = table.columns(), problem.num_microbatches - 1
    partition = best_partition(table.time, table.once, columns, weight)
    return None if partition is None else partition.objective + problem.constant


def cuts_below(problem: PipelineProblem, limit: int, most: int) -> list[tuple[int, ...]] | None:
    """Return stage ends of every solution whose objective may be within a limit, in ticks.

    None if there are more than `most`.

    Raises:
        ValueError: if the problem is malformed.
    """
    verify_pipeline_problem(problem)
    table = _start(problem, 0.0, 0, 1, None).table
    return cuts_within(problem, table, limit, most)


def _start(
    problem: PipelineProblem, deadline: float, seed: int, workers: int, known: KnownStages | None
) -> _Search:
    """Return the state before the first round."""
    kept = [kept_options(run, _undominated_options) for run in problem.runs]
    reduced = replace(problem, runs=tuple(run for run, _ in kept))
    left = tuple(options for _, options in kept)
    return _Search(
        problem=reduced,
        original=left,
        table=StageTable(reduced, _interval_bounds(reduced), known),
        deadline=deadline,
        seed=seed,
        workers=workers,
    )


def _undominated_options(options: Sequence[BlockOption]) -> tuple[int, ...]:
    """Return the indices of the options that no other beats in all six numbers.

    Of equal options the first stays.
    """
    numbers = np.array([option_numbers(option) for option in options], dtype=np.int64)
    no_worse = (numbers[:, None] <= numbers[None, :]).all(axis=2)  # [rival, own]
    is_first = np.triu(np.ones(no_worse.shape, dtype=np.bool_), 1)
    is_beaten = (no_worse & (~no_worse.T | is_first)).any(axis=0)
    return tuple(np.nonzero(~is_beaten)[0].tolist())


def _interval_bounds(problem: PipelineProblem) -> NDArray[np.int64]:
    """Return [stage, start, end] bounds; UNREACHABLE where the cuts or the memory forbid it."""
    size, last = problem.num_blocks + 1, problem.num_stages - 1
    is_cut = np.zeros(size, dtype=np.bool_)
    is_cut[list(cut_positions(problem))] = True
    places = np.nonzero(is_cut | np.isin(np.arange(size), (0, size - 1)))[0]
    ends = np.arange(size)
    long_enough = ends[None, :] - ends[:, None] >= problem.min_blocks
    if problem.anchors:
        anchors = np.concatenate([[0], np.cumsum(problem.anchors)])
        long_enough &= anchors[None, :] > anchors[:, None]
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    crossing = np.array([0, *problem.crossing, 0] if problem.crossing else [0] * size)
    working = stage_working(problem.runs, places.tolist())
    stages = []
    for stage, live in enumerate(problem.live):
        room = problem.capacity[stage] - problem.fixed[stage]
        if (live, room) not in known:
            exact = stage_time_bounds(problem.runs, live, room, places.tolist(), working)
            rounded = rounded_up(exact, problem.grain)
            own = np.full((size, size), UNREACHABLE)
            own[np.ix_(places, places)] = np.where(exact < UNREACHABLE, rounded, UNREACHABLE)
            known[live, room] = own
        may_start = is_cut if stage > 0 else ends == 0
        may_end = is_cut if stage < last else ends == size - 1
        allowed = may_start[:, None] & may_end[None, :] & long_enough
        own = known[live, room]
        if problem.slowness:
            slowed = -(-own * problem.slowness[stage] // SLOWNESS_UNIT)
            own = np.where(own < UNREACHABLE, slowed, UNREACHABLE)
        borders = problem.boundary[stage] + crossing[:, None] + crossing[None, :]
        bounds = np.minimum(own + borders, UNREACHABLE)
        stages.append(np.where(allowed, bounds, UNREACHABLE))
    return np.stack(stages)


def _cut_by_bounds(search: _Search, cutoff: int | None, log: Callable[[str], None] | None) -> bool:
    """Cut, solve the stages of the answer, and repeat until nothing in it is a mere bound.

    Leaves the best solution and the bound in `search`, both the same if it is proven.

    Returns:
        False if it is proven that no solution is below the cutoff.
    """
    table, weight = search.table, search.problem.num_microbatches - 1
    while True:
        partition = best_partition(table.time, table.once, table.columns(), weight)
        if partition is None:
            assert search.best is None, "a solution was found where none is reachable"
            return False
        search.bound = max(search.bound, partition.objective + search.problem.constant)
        if search.best is not None:
            search.bound = min(search.bound, search.best.objective)
        if cutoff is not None and search.bound >= cutoff:
            return False
        if search.best is not None and search.best.objective == search.bound:
            return True
        places = [(s, i, j) for s, (i, j) in enumerate(pairwise((0, *partition.ends)))]
        if not _refine_stages(search, places, partition.threshold):
            return True
        _keep_if_better(search, places, partition.threshold)
        if log is not None:
            best = "none" if search.best is None else str(search.best.objective)
            log(f"bound {search.bound}, best {best}, {table.num_solved} stages solved")


def _refine_stages(search: _Search, places: Sequence[tuple[int, int, int]], most_once: int) -> bool:
    """Solve the stages of a partition that are mere bounds; return False if time ran out."""
    for key in dict.fromkeys(search.table.key(place) for place in places):
        column = search.table.chosen(key, most_once)
        if column.counts:
            continue
        if clock.monotonic() >= search.deadline:
            return False
        search.table.refine(
            key, column, deadline=search.deadline, seed=search.seed, workers=search.workers
        )
    return True


def _keep_if_better(
    search: _Search, places: Sequence[tuple[int, int, int]], most_once: int
) -> None:
    """Make a solution of solved stages the best one, if it is."""
    options: list[int] = []
    for place in places:
        key = search.table.key(place)
        column = search.table.solution(key, most_once)
        if column is None:
            return
        for run, counts in zip(stage_runs(search.problem, key[2]), column.counts, strict=True):
            options += [o for o in range(len(run.options)) for _ in range(counts[o])]
    ends = tuple(end for _, _, end in places)
    costs = stage_costs(search.problem, ends, options)
    fits = all(c.memory <= room for c, room in zip(costs, search.problem.capacity, strict=True))
    assert fits, "a solved stage does not fit"
    assert hands_over(search.problem, ends, options), "blocks do not take over what is handed on"
    objective = pipeline_objective(search.problem, costs)
    if search.best is None or objective < search.best.objective:
        search.best = PipelineSolution(
            status="feasible", ends=ends, options=tuple(options), objective=objective, bound=0
        )


def _finish(search: _Search, solution: PipelineSolution) -> PipelineSolution:
    """Return a solution with the caller's option indices and the bound of the search."""
    by_block = [
        left
        for run, left in zip(search.problem.runs, search.original, strict=True)
        for _ in range(run.count)
    ]
    return replace(
        solution,
        status="optimal" if solution.objective == search.bound else "feasible",
        options=tuple(left[index] for left, index in zip(by_block, solution.options, strict=True)),
        bound=search.bound,
    )


def _without_solution(status: Status, bound: int) -> PipelineSolution:
    """Return an answer that has no stages."""
    return PipelineSolution(status=status, ends=(), options=(), objective=0, bound=bound)
