"""Level 2 as one CP-SAT programme: the reference for problems too large for exhaustive search.

For tests only: `solve_pipeline` proves the same optimum in a small part of the time.
Blocks are counted, not enumerated. The programme, over stages s, runs c of alike blocks, and
options o of a run (`count[c]` blocks):

    cum[s,c]    blocks of run c that lie in stages 0..s                      0 .. count[c]
    full[s,c]   run c ends at or before the end of stage s                   0 or 1
    n[s,c,o]    blocks of run c in stage s that use option o                 0 .. count[c]
    level[s,c,w] stage s uses an option of run c with working >= w           0 or 1
    peak[s]     working memory of stage s                                    units
    slowest, once                                                            ticks

    minimise    sum_s t[s] + (num_microbatches - 1) slowest + once + constant       _add_objective
    with        t[s] = sum_c,o (forward + backward)[c,o] n[s,c,o] + boundary[s]
                       + crossing[sum_c cum[s-1,c]] + crossing[sum_c cum[s,c]]          _crossings

    subject to  cum[s,c] >= count[c] full[s,c]                                      _add_end
                cum[s,c+1] <= count[c+1] full[s,c]                                  _add_end
                sum_c cum[s,c] in the allowed cut positions                         _add_end
                sum_o n[s,c,o] = cum[s,c] - cum[s-1,c]                              _add_counts
                sum_c cum[s,c] - cum[s-1,c] >= min_blocks                           _add_counts
                the same over the runs with anchors >= 1                            _add_counts
                sum of n[s,c,o] with working[o] >= w  <=  count[c] level[s,c,w]     add_peak
                peak[s] >= sum_w step[w] level[s,c,w]                               add_peak
                sum (static + live[s] kept)[c,o] n[s,c,o] + peak[s] + fixed[s]
                    <= capacity[s]                                                  _add_memory
                slowest >= t[s],  once >= sum once[c,o] n[s,c,o], rounded up        _add_objective
                objective < cutoff                                                  _add_objective

Filling runs from the front makes the overlap of a run and a stage linear: no clamps. Where a run
has one block, `full` is `cum`, `level` is a sum of n, and n is one literal per (option, stage).
`step[w]` is the distance of w from the next smaller working memory of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ortools.sat.python import cp_model

from autoplan.search.cp_sat import run_solver
from autoplan.search.evaluate import (
    cut_positions,
    pipeline_objective,
    stage_costs,
    verify_pipeline_problem,
)
from autoplan.search.problem import PipelineProblem, PipelineSolution
from autoplan.search.stage import add_peak

__all__ = ["solve_by_counting"]


@dataclass(slots=True, kw_only=True)
class _CountingModel:
    """The programme while it is being built.

    Attributes:
        filled: cum[s,c]; the last stage's are constants.
        counts: n[s,c,o].
    """

    problem: PipelineProblem
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    filled: list[list[Any]] = field(default_factory=list)
    counts: list[list[list[Any]]] = field(default_factory=list)


def solve_by_counting(
    problem: PipelineProblem,
    *,
    cutoff: int | None = None,
    time_limit_s: float,
    seed: int = 0,
    workers: int = 1,
    log: Callable[[str], None] | None = None,
) -> PipelineSolution:
    """Return the solution of least objective, with the arguments and statuses of `solve_pipeline`.

    Raises:
        ValueError: if the problem is malformed, or its stages are on unlike devices.
    """
    verify_pipeline_problem(problem)
    if problem.slowness:
        raise ValueError("the counting programme knows alike stages only: leave slowness empty")
    built = _CountingModel(problem=problem)
    for stage in range(problem.num_stages - 1):
        _add_end(built, stage)
    built.filled.append([run.count for run in problem.runs])
    for stage in range(problem.num_stages):
        _add_counts(built, stage)
        _add_memory(built, stage)
    _add_objective(built, cutoff)
    outcome = run_solver(
        built.model,
        [n for stage in built.counts for run in stage for n in run],
        time_limit_s=time_limit_s,
        seed=seed,
        workers=workers,
        log=log,
    )
    if not outcome.values:
        bound = (cutoff or 0) if outcome.status == "infeasible" else outcome.bound
        return PipelineSolution(
            status=outcome.status, ends=(), options=(), objective=0, bound=bound
        )
    ends, options = _answer(built, outcome.values)
    objective = pipeline_objective(problem, stage_costs(problem, ends, options))
    return PipelineSolution(
        status=outcome.status,
        ends=ends,
        options=options,
        objective=objective,
        bound=outcome.bound,
    )


def _add_end(built: _CountingModel, stage: int) -> None:
    """Add the end of a stage: runs filled from the front, up to an allowed cut."""
    problem, model = built.problem, built.model
    filled = [
        model.new_int_var(0, run.count, f"cum[{stage},{index}]")
        for index, run in enumerate(problem.runs)
    ]
    for index, run in enumerate(problem.runs[:-1]):
        full = filled[index]
        if run.count > 1:
            full = model.new_bool_var(f"full[{stage},{index}]")
            model.add(filled[index] >= run.count * full)
        model.add(filled[index + 1] <= problem.runs[index + 1].count * full)
    cuts = cp_model.Domain.from_values(list(cut_positions(problem)))
    model.add_linear_expression_in_domain(sum(filled), cuts)
    built.filled.append(filled)


def _add_counts(built: _CountingModel, stage: int) -> None:
    """Add the counts of a stage: as many blocks of each run as its end takes on."""
    problem, model = built.problem, built.model
    before = built.filled[stage - 1] if stage > 0 else [0] * len(problem.runs)
    after = built.filled[stage]
    counts = []
    for index, run in enumerate(problem.runs):
        own = [
            model.new_int_var(0, run.count, f"n[{stage},{index},{option}]")
            for option in range(len(run.options))
        ]
        model.add(sum(own) == after[index] - before[index])
        counts.append(own)
    model.add(sum(n for own in counts for n in own) >= problem.min_blocks)
    if problem.anchors:
        firsts = accumulate((run.count for run in problem.runs[:-1]), initial=0)
        anchored = zip(firsts, counts, strict=True)
        model.add(sum(n for first, own in anchored if problem.anchors[first] for n in own) >= 1)
    built.counts.append(counts)


def _add_memory(built: _CountingModel, stage: int) -> None:
    """Add the memory limit of a stage."""
    problem, model = built.problem, built.model
    room = problem.capacity[stage] - problem.fixed[stage]
    peak = model.new_int_var(0, max(room, 0), f"peak[{stage}]")
    held: list[Any] = []
    for run, counts in zip(problem.runs, built.counts[stage], strict=True):
        add_peak(model, run, counts, peak)
        held += [
            (option.static + problem.live[stage] * option.kept) * n
            for option, n in zip(run.options, counts, strict=True)
        ]
    model.add(sum(held) + peak <= room)


def _add_objective(built: _CountingModel, cutoff: int | None) -> None:
    """Minimise the step time, below the cutoff."""
    problem, model = built.problem, built.model
    slowest = model.new_int_var(0, _most(problem, "time") + problem.grain, "slowest")
    once_grains = model.new_int_var(0, -(-_most(problem, "once") // problem.once_grain), "once")
    times = []
    crossings = _crossings(built)
    for stage, counts in enumerate(built.counts):
        pairs = [
            (option, n)
            for run, own in zip(problem.runs, counts, strict=True)
            for option, n in zip(run.options, own, strict=True)
        ]
        ticks = sum((option.forward + option.backward) * n for option, n in pairs)
        grains = model.new_int_var(0, -(-_most(problem, "time") // problem.grain), f"t[{stage}]")
        model.add(problem.grain * grains >= ticks)
        borders = problem.boundary[stage] + crossings[stage] + crossings[stage + 1]
        times.append(problem.grain * grains + borders)
        model.add(slowest >= times[-1])
        model.add(problem.once_grain * once_grains >= sum(option.once * n for option, n in pairs))
    once = problem.once_grain * once_grains
    objective = sum(times) + (problem.num_microbatches - 1) * slowest + once + problem.constant
    if cutoff is not None:
        model.add(objective <= cutoff - 1)
    model.minimize(objective)


def _crossings(built: _CountingModel) -> list[Any]:
    """Return the ticks of the border before each stage, and of the one after the last."""
    problem, model = built.problem, built.model
    if not problem.crossing:
        return [0] * (problem.num_stages + 1)
    found: list[Any] = [0]
    for stage, filled in enumerate(built.filled[:-1]):
        position = model.new_int_var(1, problem.num_blocks - 1, f"cut[{stage}]")
        model.add(position == sum(filled))
        found.append(model.new_int_var(0, max(problem.crossing), f"crossing[{stage}]"))
        model.add_element(position, [0, *problem.crossing], found[-1])
    return [*found, 0]


def _most(problem: PipelineProblem, which: str) -> int:
    """Return the greatest time or once that a stage can have."""
    if which == "once":
        return sum(run.count * max(o.once for o in run.options) for run in problem.runs)
    times = (run.count * max(o.forward + o.backward for o in run.options) for run in problem.runs)
    return sum(times) + max(problem.boundary) + 2 * max(problem.crossing, default=0)


def _answer(
    built: _CountingModel, values: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ends and the option per block from the values of all counts."""
    remaining = iter(values)
    ends: list[int] = []
    options: list[list[int]] = [[] for _ in built.problem.runs]
    for counts in built.counts:
        for run, own in enumerate(counts):
            for option in range(len(own)):
                options[run] += [option] * next(remaining)
        ends.append(sum(len(chosen) for chosen in options))
    return tuple(ends), tuple(option for chosen in options for option in chosen)
