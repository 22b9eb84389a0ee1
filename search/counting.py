"""Level 2: cut a chain of blocks into stages and choose an option for every block.

Blocks are counted, not enumerated. The programme, over stages s, runs c of alike blocks, and
options o of a run (`count[c]` blocks, `first[c]` blocks before it):

    cum[s,c]    blocks of run c that lie in stages 0..s                      0 .. count[c]
    full[s,c]   run c ends at or before the end of stage s                   0 or 1
    n[s,c,o]    blocks of run c in stage s that use option o                 0 .. count[c]
    level[s,w]  stage s uses an option whose working memory is w or more     0 or 1
    slowest, once                                                            ticks

    minimise    sum_s t[s] + (num_microbatches - 1) slowest + once + constant         _add_times
    with        t[s] = sum_c,o (forward + backward)[c,o] n[s,c,o] + boundary[s]

    subject to  cum[s,c] >= count[c] full[s,c]                                        _add_cuts
                cum[s,c+1] <= count[c+1] full[s,c]                                    _add_cuts
                sum_c cum[s,c] in the allowed cut positions                           _add_cuts
                sum_o n[s,c,o] = cum[s,c] - cum[s-1,c]                                _add_counts
                sum of n[s,c,o] with working[o] >= w  <=  count[c] level[s,w]         _add_memory
                sum (static + live[s] kept)[c,o] n[s,c,o] + sum_w step[w] level[s,w]
                    + fixed[s] <= capacity[s]                                         _add_memory
                slowest >= t[s],  once >= sum once[c,o] n[s,c,o]                      _add_times
                objective < cutoff                                                    _add_times

Filling runs from the front makes the overlap of a run and a stage linear: no clamps. Where all
runs have one block, `full` is `cum`, `n` is one literal per (block, option, stage), and the same
programme is the prefix-monotone one. `step[w]` is the distance of w from the next smaller level.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortools.sat.python import cp_model

from autoplan.search.cp_sat import run_solver
from autoplan.search.evaluate import (
    cut_positions,
    option_numbers,
    pipeline_objective,
    stage_costs,
    verify_pipeline_problem,
)
from autoplan.search.problem import BlockOption, PipelineProblem, PipelineSolution, Run

__all__ = ["solve_by_counting"]


@dataclass(slots=True, kw_only=True)
class _PipelineModel:
    """The programme while it is being built.

    Attributes:
        runs: the runs with dominated options removed.
        original: per run the original index of every option left.
        filled: cum[s,c], variables or constants.
        counts: n[s,c,o].
    """

    problem: PipelineProblem
    runs: tuple[Run, ...]
    original: tuple[tuple[int, ...], ...]
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    filled: list[list[Any]] = field(default_factory=list)
    counts: list[list[list[Any]]] = field(default_factory=list)


def solve_by_counting(problem, *, cutoff, least, time_limit_s, seed, workers, log):
    built = _build(problem, cutoff)
    variables = [n for stage in built.counts for run in stage for n in run]
    outcome = run_solver(
        built.model, variables, time_limit_s=time_limit_s, seed=seed, workers=workers, log=log,
        tuning=_TUNING,
    )
    if not outcome.values:
        return PipelineSolution(status=outcome.status, ends=(), options=(), objective=0, bound=cutoff or 0)
    ends, options = _answer(built, outcome.values)
    costs = stage_costs(problem, ends, options)
    return PipelineSolution(
        status=outcome.status, ends=ends, options=options,
        objective=pipeline_objective(problem, costs), bound=outcome.bound)

_TUNING={}

def _build(problem: PipelineProblem, cutoff: int | None) -> _PipelineModel:
    left = tuple(_undominated_options(run.options) for run in problem.runs)
    built = _PipelineModel(
        problem=problem,
        runs=tuple(
            Run(count=run.count, options=tuple(run.options[index] for index in kept))
            for run, kept in zip(problem.runs, left, strict=True)
        ),
        original=left,
    )
    _add_cuts(built)
    _add_counts(built)
    _add_memory(built)
    _add_times(built, cutoff)
    return built


def _undominated_options(options: Sequence[BlockOption]) -> tuple[int, ...]:
    """Return the indices of the options that no other beats in all six numbers.

    Of equal options the first stays.
    """
    numbers = [option_numbers(option) for option in options]
    return tuple(
        index
        for index, own in enumerate(numbers)
        if not any(
            all(x <= y for x, y in zip(other, own, strict=True)) and (other != own or rival < index)
            for rival, other in enumerate(numbers)
            if rival != index
        )
    )


def _add_cuts(built: _PipelineModel) -> None:
    problem, model = built.problem, built.model
    allowed = cut_positions(problem)
    first=0
    stages = problem.num_stages
    pos=set(allowed)
    prev_full=None
    for stage in range(stages - 1):
        row=[]; start=0; full=[]
        last=None
        for c,run in enumerate(built.runs):
            if last is not None and run.count==1 and built.runs[c-1].count==1 and start not in pos:
                v=row[-1]
            else:
                v=model.new_int_var(0,run.count,f"cum[{stage},{c}]")
            if c>0:
                prev=built.runs[c-1]
                if prev.count==1: f=row[-1]
                else:
                    f=model.new_bool_var(f"full[{stage},{c-1}]")
                    model.add(row[-1]>=prev.count*f)
                if v is not row[-1]: model.add(v<=run.count*f)
                full.append(f)
            row.append(v); last=v
            start+=run.count
        built.filled.append(row)
        lo=(stage+1)*problem.min_blocks; hi=problem.num_blocks-(stages-1-stage)*problem.min_blocks
        dom=[p for p in allowed if lo<=p<=hi]
        model.add_linear_expression_in_domain(sum(row), cp_model.Domain.from_values(dom))
        if prev_full: 
            for a,b in zip(prev_full,full): 
                if a is not b: model.add(a<=b)
        prev_full=full
    built.filled.append([run.count for run in built.runs])


def _add_counts(built: _PipelineModel) -> None:
    prev=[0]*len(built.runs)
    for stage,row in enumerate(built.filled):
        cs=[]
        for c,run in enumerate(built.runs):
            ns=[built.model.new_int_var(0,run.count,f"n[{stage},{c},{o}]") for o in range(len(run.options))]
            built.model.add(sum(ns)==row[c]-prev[c])
            cs.append(ns)
        built.counts.append(cs)
        if stage<len(built.filled)-1 or stage>0:
            built.model.add(sum(row)-sum(prev)>=built.problem.min_blocks)
        prev=row


def _add_memory(built: _PipelineModel) -> None:
    p=built.problem
    for stage,cs in enumerate(built.counts):
        room=p.capacity[stage]-p.fixed[stage]
        if room<0:
            built.model.add_bool_or([]); return
        peak=built.model.new_int_var(0,room,f"peak[{stage}]")
        total=[]
        for c,run in enumerate(built.runs):
            for o,n in zip(run.options,cs[c]):
                total.append((o.static+p.live[stage]*o.kept)*n)
            if run.count==1:
                built.model.add(peak>=sum(o.working*n for o,n in zip(run.options,cs[c])))
            else:
                lv=sorted({o.working for o in run.options}); prev=0; terms=[]
                for w in lv:
                    b=built.model.new_bool_var("")
                    built.model.add(sum(n for o,n in zip(run.options,cs[c]) if o.working>=w)<=run.count*b)
                    terms.append((w-prev)*b); prev=w
                built.model.add(peak>=sum(terms))
        built.model.add(sum(total)+peak<=room)


def _add_times(built: _PipelineModel, cutoff: int | None) -> None:
    p=built.problem
    tot=sum(r.count*max(o.forward+o.backward for o in r.options) for r in built.runs)+max(p.boundary)
    lo=sum(r.count*min(o.forward+o.backward for o in r.options) for r in built.runs)+sum(p.boundary)
    slow=built.model.new_int_var(-(-lo//p.num_stages),tot,"slowest")
    once=built.model.new_int_var(0,sum(r.count*max(o.once for o in r.options) for r in built.runs),"once")
    allt=[]
    for stage,cs in enumerate(built.counts):
        t=sum((o.forward+o.backward)*n for c,run in enumerate(built.runs) for o,n in zip(run.options,cs[c]))
        built.model.add(slow>=t+p.boundary[stage])
        allt.append(t+p.boundary[stage])
        built.model.add(once>=sum(o.once*n for c,run in enumerate(built.runs) for o,n in zip(run.options,cs[c])))
    obj=sum(allt)+(p.num_microbatches-1)*slow+once+p.constant
    if cutoff is not None: built.model.add(obj<=cutoff-1)
    built.model.minimize(obj)


def _answer(built: _PipelineModel, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not values: return (),()
    it=iter(values); ends=[]; pos=0; opts=[[] for _ in built.runs]
    for cs in built.counts:
        for c,ns in enumerate(cs):
            for o in range(len(ns)):
                k=next(it); pos+=k; opts[c]+= [built.original[c][o]]*k
        ends.append(pos)
    return tuple(ends), tuple(x for r in opts for x in r)

def _undominated_options(options): return tuple(range(len(options)))
