"""Level 2: cut a chain of blocks into stages and choose an option for every block.

The programme, over stage ends e[s] and the options of the blocks between them:

    minimise    sum_s t[s] + (num_microbatches - 1) max_s t[s] + max_s once[s] + constant
    with        t[s] = boundary[s] + sum (forward + backward) of the blocks of stage s
    subject to  the memory of every stage, the allowed cuts, `together`, `min_blocks`

Within a stage only the least time matters once the cuts are known, so the programme falls apart:

    1. bound every interval of blocks as every stage, by a relaxation          stage.py
       without whole numbers                                                   _interval_bounds
    2. cut the chain at the least objective under these bounds                 partition.py
       which is a lower bound of the whole
    3. solve the intervals of that answer exactly by CP-SAT, where they        stage.py
       have not been; if none was left, the answer is optimal                  _solve_exactly
       else go to 2 with the exact costs

Few intervals are ever solved. Where options of one block differ in `once`, 1 and 2 take the least,
which stays a bound; if the answer then costs more than the bound, the whole programme goes to
CP-SAT (counting.py) with the answer as its cutoff.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoplan.search.counting import solve_by_counting
from autoplan.search.evaluate import (
    cut_positions,
    option_numbers,
    pipeline_objective,
    stage_costs,
    verify_pipeline_problem,
)
from autoplan.search.partition import UNREACHABLE, Partition, best_partition
from autoplan.search.problem import BlockOption, PipelineProblem, PipelineSolution, Run, Status
from autoplan.search.stage import StageSolution, solve_stage, stage_time_bounds

__all__ = ["solve_pipeline"]

_StageKey = tuple[int, int, tuple[int, ...]]


@dataclass(slots=True, kw_only=True)
class _Search:
    """What is known while the search runs.

    Attributes:
        problem: with dominated options removed.
        original: per run the original index of every option left.
        time: [stage, start, end] lower bounds in ticks, boundary included, or exact times.
        once: [start, end] least ticks per step.
        solved: the exact stage of every key that was solved.
        is_exact: [stage, start, end] whether `time` is exact.
        best: the best solution known.
        bound: no solution is below it.
    """

    problem: PipelineProblem
    original: tuple[tuple[int, ...], ...]
    time: NDArray[np.int64]
    once: NDArray[np.int64]
    is_exact: NDArray[np.bool_]
    deadline: float
    seed: int
    workers: int
    solved: dict[_StageKey, StageSolution] = field(default_factory=dict)
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
) -> PipelineSolution:
    """Return the cuts and options of least objective.

    Args:
        problem: what to cut and choose.
        cutoff: ticks; only solutions strictly below it are wanted.
        time_limit_s: wall-clock seconds.
        seed: of the solver.
        workers: threads of the solver.
        log: receives a line per round.

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
    search = _start(problem, deadline, seed, workers)
    relaxed = _cut_by_bounds(search, cutoff, log)
    if relaxed is None:
        return _without_solution("infeasible", cutoff or 0)
    best = search.best
    if best is not None and best.objective <= search.bound:
        return _finish(search, best, "optimal", cutoff)
    if clock.monotonic() >= deadline:
        if best is None or (cutoff is not None and best.objective >= cutoff):
            return _without_solution("unknown", search.bound)
        return _finish(search, best, "feasible", cutoff)
    return _solve_whole(search, cutoff, log)


def _start(problem: PipelineProblem, deadline: float, seed: int, workers: int) -> _Search:
    """Return the state before the first round."""
    left = tuple(_undominated_options(run.options) for run in problem.runs)
    runs = tuple(
        Run(count=run.count, options=tuple(run.options[index] for index in kept))
        for run, kept in zip(problem.runs, left, strict=True)
    )
    reduced = replace(problem, runs=runs)
    time = _interval_bounds(reduced)
    least = [min(o.once for o in run.options) for run in runs for _ in range(run.count)]
    prefix = np.concatenate([[0], np.cumsum(np.array(least, dtype=np.int64))])
    return _Search(
        problem=reduced,
        original=left,
        time=time,
        once=np.asarray(prefix[None, :] - prefix[:, None], dtype=np.int64),
        is_exact=np.zeros(time.shape, dtype=np.bool_),
        deadline=deadline,
        seed=seed,
        workers=workers,
    )


def _undominated_options(options: Sequence[BlockOption]) -> tuple[int, ...]:
    """Return the indices of the options that no other beats in all six numbers.

    Of equal options the first stays.
    """
    numbers = [option_numbers(option) for option in options]

    def loses(index: int, rival: int) -> bool:
        own, other = numbers[index], numbers[rival]
        return all(x <= y for x, y in zip(other, own, strict=True)) and (
            other != own or rival < index
        )

    every = range(len(numbers))
    return tuple(i for i in every if not any(loses(i, rival) for rival in every if rival != i))


def _interval_bounds(problem: PipelineProblem) -> NDArray[np.int64]:
    """Return [stage, start, end] bounds; UNREACHABLE where the cuts or the memory forbid it."""
    blocks = [run.options for run in problem.runs for _ in range(run.count)]
    size, last = problem.num_blocks + 1, problem.num_stages - 1
    is_cut = np.zeros(size, dtype=np.bool_)
    is_cut[list(cut_positions(problem))] = True
    ends = np.arange(size)
    long_enough = ends[None, :] - ends[:, None] >= problem.min_blocks
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    stages = []
    for stage, live in enumerate(problem.live):
        room = problem.capacity[stage] - problem.fixed[stage]
        if (live, room) not in known:
            known[live, room] = stage_time_bounds(blocks, live, room)
        may_start = is_cut if stage > 0 else ends == 0
        may_end = is_cut if stage < last else ends == size - 1
        allowed = may_start[:, None] & may_end[None, :] & long_enough
        bounds = np.minimum(known[live, room] + problem.boundary[stage], UNREACHABLE)
        stages.append(np.where(allowed, bounds, UNREACHABLE))
    return np.stack(stages)


def _cut_by_bounds(
    search: _Search, cutoff: int | None, log: Callable[[str], None] | None
) -> Partition | None:
    """Cut, solve the intervals of the answer, and repeat until nothing in it is a mere bound.

    Leaves the best solution and the bound in `search`.

    Returns:
        The last partition, or None if no solution is below the cutoff.
    """
    problem = search.problem
    while True:
        partition = best_partition(search.time, search.once, problem.num_microbatches - 1)
        if partition is None:
            return None
        search.bound = max(search.bound, partition.objective + problem.constant)
        if cutoff is not None and search.bound >= cutoff:
            return None
        places = [(s, i, j) for s, (i, j) in enumerate(pairwise((0, *partition.ends)))]
        pending = [place for place in places if not search.is_exact[place]]
        for place in pending:
            if clock.monotonic() >= search.deadline:
                return partition
            _solve_exactly(search, *place)
        _keep_if_better(search, places)
        if log is not None:
            best = "none" if search.best is None else str(search.best.objective)
            log(f"bound {search.bound}, best {best}, {len(search.solved)} stages solved")
        if not pending or (search.best is not None and search.best.objective <= search.bound):
            return partition


def _stage_key(search: _Search, stage: int, start: int, end: int) -> _StageKey:
    """Return what the least time of an interval depends on: live, room, blocks of each run."""
    problem = search.problem
    counts, first = [], 0
    for run in problem.runs:
        counts.append(max(0, min(end, first + run.count) - max(start, first)))
        first += run.count
    room = problem.capacity[stage] - problem.fixed[stage]
    return problem.live[stage], room, tuple(counts)


def _solve_exactly(search: _Search, stage: int, start: int, end: int) -> None:
    """Replace the bound of an interval by its exact time, also where it lies elsewhere in a run."""
    key = _stage_key(search, stage, start, end)
    live, room, counts = key
    solution = search.solved.get(key)
    if solution is None:
        solution = solve_stage(
            _stage_runs(search.problem, counts),
            live,
            room,
            time_limit_s=search.deadline - clock.monotonic(),
            seed=search.seed,
            workers=search.workers,
        )
        search.solved[key] = solution
    for same, (own_live, own_room) in enumerate(_stage_rooms(search.problem)):
        if (own_live, own_room) == (live, room):
            for first in _shifted_starts(search.problem, counts, start):
                _record(search, (same, first, first + end - start), solution)


def _record(search: _Search, place: tuple[int, int, int], solution: StageSolution) -> None:
    """Write what is known of a stage to one place, where the cuts allow the place at all."""
    if search.time[place] >= UNREACHABLE:
        return
    if solution.status == "infeasible":
        search.time[place] = UNREACHABLE
    elif solution.status == "optimal":
        search.time[place] = solution.time + search.problem.boundary[place[0]]
        search.is_exact[place] = True
    else:
        known = solution.bound + search.problem.boundary[place[0]]
        search.time[place] = max(int(search.time[place]), known)


def _stage_rooms(problem: PipelineProblem) -> list[tuple[int, int]]:
    """Return per stage its live micro-batches and the room for its blocks."""
    rooms = [room - fixed for room, fixed in zip(problem.capacity, problem.fixed, strict=True)]
    return list(zip(problem.live, rooms, strict=True))


def _stage_runs(problem: PipelineProblem, counts: Sequence[int]) -> list[Run]:
    """Return the runs of a stage that has `counts` blocks of each run of the problem."""
    return [
        Run(count=count, options=run.options)
        for run, count in zip(problem.runs, counts, strict=True)
        if count
    ]


def _shifted_starts(problem: PipelineProblem, counts: Sequence[int], start: int) -> range:
    """Return where an interval of these counts may start: all over a run if it lies in one."""
    used = [index for index, count in enumerate(counts) if count]
    if len(used) != 1:
        return range(start, start + 1)
    first = sum(run.count for run in problem.runs[: used[0]])
    return range(first, first + problem.runs[used[0]].count - counts[used[0]] + 1)


def _keep_if_better(search: _Search, places: Sequence[tuple[int, int, int]]) -> None:
    """Make a solution of solved stages the best one, if it is."""
    ends = tuple(end for _, _, end in places)
    options: list[int] = []
    for place in places:
        key = _stage_key(search, *place)
        solution = search.solved[key]
        if not solution.counts:
            return
        for run, counts in zip(_stage_runs(search.problem, key[2]), solution.counts, strict=True):
            options += [o for o in range(len(run.options)) for _ in range(counts[o])]
    costs = stage_costs(search.problem, ends, options)
    fits = all(c.memory <= room for c, room in zip(costs, search.problem.capacity, strict=True))
    assert fits, "a solved stage does not fit"
    objective = pipeline_objective(search.problem, costs)
    if search.best is None or objective < search.best.objective:
        search.best = PipelineSolution(
            status="feasible", ends=ends, options=tuple(options), objective=objective, bound=0
        )


def _solve_whole(
    search: _Search, cutoff: int | None, log: Callable[[str], None] | None
) -> PipelineSolution:
    """Return the answer of the whole programme, for options that differ in `once`."""
    limits = [limit for limit in (cutoff, search.best and search.best.objective) if limit]
    whole = solve_by_counting(
        search.problem,
        cutoff=min(limits, default=None),
        least=search.bound,
        time_limit_s=search.deadline - clock.monotonic(),
        seed=search.seed,
        workers=search.workers,
        log=log,
    )
    if whole.status in ("optimal", "feasible"):
        return _finish(search, whole, whole.status, None)
    if search.best is None or (cutoff is not None and search.best.objective >= cutoff):
        bound = (cutoff or 0) if whole.status == "infeasible" else search.bound
        return _without_solution(whole.status, bound)
    if whole.status == "infeasible":
        return _finish(search, replace(search.best, bound=search.best.objective), "optimal", None)
    return _finish(search, replace(search.best, bound=whole.bound), "feasible", None)


def _finish(
    search: _Search, solution: PipelineSolution, status: Status, cutoff: int | None
) -> PipelineSolution:
    """Return a solution with the caller's option indices and the bound of the search."""
    assert cutoff is None or solution.objective < cutoff, "a solution at or above the cutoff"
    by_block = [
        left
        for run, left in zip(search.problem.runs, search.original, strict=True)
        for _ in range(run.count)
    ]
    return replace(
        solution,
        status=status,
        options=tuple(left[index] for left, index in zip(by_block, solution.options, strict=True)),
        bound=max(search.bound, solution.bound),
    )


def _without_solution(status: Status, bound: int) -> PipelineSolution:
    """Return an answer that has no stages."""
    return PipelineSolution(status=status, ends=(), options=(), objective=0, bound=bound)
