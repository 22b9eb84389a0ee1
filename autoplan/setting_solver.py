"""Level 2 of one setting: its pipeline problem, solved until what wins fits by the exact model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoplan.cluster import Cluster
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.interleaving import dealt, even_rank_ends, rank_cuts
from autoplan.plan_prices import plan_price
from autoplan.search.candidates import NOTHING_FITS, Refinement
from autoplan.search.columns import KnownStages
from autoplan.search.evaluate import block_options, stage_costs
from autoplan.search.pipeline import relaxed_bound, solve_pipeline
from autoplan.search.problem import (
    SLOWNESS_UNIT,
    BlockOption,
    PipelineProblem,
    PipelineSolution,
    Run,
    Status,
)
from autoplan.search_options import alike, block_option
from autoplan.settings import Setting
from autoplan.stage_bytes import batch_bytes, side_bytes
from autoplan.stage_ends import even_stage_ends, holders
from autoplan.units import to_ticks

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Posed", "pipeline_problem", "relaxation_bound", "solve_setting"]

_MAX_REPAIRS = 8
_UNEVEN = 0.01  # by which stages of a rank may make a step longer than even ones would
_GRAIN_BITS = 12  # a stage's time is rounded up by 2**-12 of it at most, 0.025 %
_ONCE_GRAIN_BITS = 10  # what is paid once a step by 2**-10 of the step at most, 0.1 %
_MOST_EXACT_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Posed:
    """The problem of a setting for one way in which activations cross borders of blocks.

    Attributes:
        problem: with the capacities of the devices.
        per_call: the decisions behind its options.
        calibrated: capacities, as far above those as the linear memory is above the exact one.
        bound: ticks below which no solution within them is; None: there is none.
        known: its stages that are solved.
    """

    problem: PipelineProblem
    per_call: Sequence[tuple[Decision, ...]]
    calibrated: tuple[int, ...]
    bound: int | None
    known: KnownStages


def _posed(planner: Planner, setting: Setting, is_sequence_parallel: bool) -> Posed:
    """Return the problem of a setting, posed once."""
    key = (setting, is_sequence_parallel, planner.even_cuts)
    if key not in planner.posed:
        problem, per_call = pipeline_problem(planner, setting, is_sequence_parallel)
        calibrated = _calibrated(planner, setting, problem, per_call)
        bound = relaxed_bound(replace(problem, capacity=calibrated))
        planner.posed[key] = Posed(
            problem=problem,
            per_call=per_call,
            calibrated=calibrated,
            bound=None if bound is None else bound // setting.virtual_stages,
            known={},
        )
    return planner.posed[key]


def solve_setting(
    planner: Planner, setting: Setting, cutoff: int | None, time_limit_s: float
) -> PipelineSolution:
    """Return the best cuts and options of a setting.

    The linear memory of the problem is an upper estimate almost everywhere. So the stages first
    get as much more as it exceeds the exact model by at the leanest options. Where the exact
    model finds a stage above its capacity, the stage gets that much less and the problem is
    solved again, so that what is returned fits exactly.
    """
    pricer = planner.pricer(setting.microbatch_size)
    best: PipelineSolution | None = None
    bounds: list[int] = []
    for is_sliced in reversed(pricer.borders(setting.tp)):
        # Whole activations are simpler, so they win where both are as fast.
        below = cutoff if best is None else best.objective + 1
        solution = _solve_borders(planner, setting, is_sliced, below, time_limit_s)
        if solution.status != "infeasible":
            bounds.append(solution.bound)
        if solution.options:
            best = solution
        elif best is None:
            without = solution
    if best is None:
        status: Status = "unknown" if bounds else "infeasible"
        return replace(without, status=status, bound=min(bounds, default=without.bound))
    bound = min(*bounds, best.objective)
    status = "optimal" if bound == best.objective else "feasible"
    return replace(best, status=status, bound=bound)


def _solve_borders(
    planner: Planner,
    setting: Setting,
    is_sequence_parallel: bool,
    cutoff: int | None,
    time_limit_s: float,
) -> PipelineSolution:
    """Return the best cuts and options where activations cross the borders of blocks in one way."""
    posed = _posed(planner, setting, is_sequence_parallel)
    if posed.bound is None or (cutoff is not None and posed.bound >= cutoff):
        return _without(cutoff)
    for capacity in dict.fromkeys((posed.calibrated, posed.problem.capacity)):
        solution, is_first = _repaired(planner, setting, posed, capacity, cutoff, time_limit_s)
        if solution.options or is_first:
            break
    return replace(solution, variant=int(is_sequence_parallel))


def relaxation_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from the best cuts of a relaxation of each stage, or why nothing fits."""
    if setting.virtual_stages > 1:
        return Refinement()
    borders = planner.pricer(setting.microbatch_size).borders(setting.tp)
    found = [_posed(planner, setting, is_sliced).bound for is_sliced in borders]
    bounds = [bound for bound in found if bound is not None]
    if not bounds:
        return Refinement(infeasible=NOTHING_FITS)
    return Refinement(bound=min(bounds))


def _repaired(
    planner: Planner,
    setting: Setting,
    posed: Posed,
    capacity: tuple[int, ...],
    cutoff: int | None,
    time_limit_s: float,
) -> tuple[PipelineSolution, bool]:
    """Return a solution that fits exactly, or one without options, and if that came at once."""
    pricer, per_call = planner.pricer(setting.microbatch_size), posed.per_call
    problem = replace(posed.problem, capacity=capacity)
    for attempt in range(_MAX_REPAIRS):
        by_rank = solution = _solved(setting, problem, cutoff, time_limit_s, posed.known)
        if not solution.options:
            return solution, attempt == 0
        if setting.virtual_stages > 1:
            solution = dealt(pricer.trace, problem, by_rank, setting.virtual_stages)
        chosen = [d[o] for d, o in zip(per_call, solution.options, strict=True)]
        price = plan_price(pricer, setting, solution.ends, chosen)
        totals = [cluster.total_bytes for cluster in stage_clusters(planner.cluster, setting)]
        excess = [m.peak - total for m, total in zip(price.memory, totals, strict=True)]
        if max(excess) <= 0:
            if setting.virtual_stages > 1:
                solution = _as_dealt(planner, solution, price.step_time_s, cutoff)
            return solution, False
        # Below what this answer takes by the linear memory, or the same answer would come again.
        linear = [cost.memory for cost in stage_costs(problem, by_rank.ends, by_rank.options)]
        capacity = tuple(
            used - -(-over // pricer.memory_unit) if over > 0 else room
            for room, used, over in zip(problem.capacity, linear, excess, strict=True)
        )
        problem = replace(problem, capacity=capacity)
    return _without(cutoff), False


def _without(cutoff: int | None) -> PipelineSolution:
    """Return that nothing is below the cutoff."""
    return PipelineSolution(
        status="infeasible", ends=(), options=(), objective=0, bound=cutoff or 0
    )


def _as_dealt(
    planner: Planner, solution: PipelineSolution, step_time_s: float, cutoff: int | None
) -> PipelineSolution:
    """Return a solution with the time that its stages, as they were dealt, really take.

    Where they are so uneven that this is longer than the ranks' shares allow, the setting is not in
    the space, unless its number of stages is the user's.
    """
    objective = max(solution.objective, to_ticks(step_time_s))
    is_even = objective <= solution.objective * (1 + _UNEVEN)
    is_wanted = is_even or "virtual_stages" in planner.pins
    if not is_wanted or (cutoff is not None and objective >= cutoff):
        return _without(cutoff)
    bound = objective if solution.status == "optimal" else solution.bound
    return replace(solution, objective=objective, bound=bound)


def _solved(
    setting: Setting,
    problem: PipelineProblem,
    cutoff: int | None,
    time_limit_s: float,
    known: KnownStages,
) -> PipelineSolution:
    """Return the solution of a problem whose times are a number of ticks for each stage of a rank.

    With v stages a rank a step takes m times the slowest rank and a v-th of the others, so v steps
    take as long as one of m v micro-batches without.
    """
    v = setting.virtual_stages
    scaled = None if cutoff is None else cutoff * v
    found = solve_pipeline(problem, cutoff=scaled, time_limit_s=time_limit_s, known=known)
    return replace(found, objective=found.objective // v, bound=found.bound // v)


def _calibrated(
    planner: Planner,
    setting: Setting,
    problem: PipelineProblem,
    per_call: Sequence[Sequence[Decision]],
) -> tuple[int, ...]:
    """Return capacities that make the linear memory exact at the leanest options.

    Measured on even cuts; a stage where the linear memory is too low keeps its capacity.
    """
    pricer = planner.pricer(setting.microbatch_size)
    ends = _even_ends(pricer.trace, setting)
    live = [
        alive
        for alive, start, end in zip(problem.live, (0, *ends), ends, strict=False)
        for _ in range(start, end)
    ]
    leanest = [
        min(range(len(own)), key=lambda i: own[i].static + alive * own[i].kept + own[i].working)
        for own, alive in zip(block_options(problem), live, strict=True)
    ]
    linear = [cost.memory for cost in stage_costs(problem, ends, leanest)]
    solution = PipelineSolution(
        status="feasible", ends=ends, options=tuple(leanest), objective=0, bound=0
    )
    if setting.virtual_stages > 1:
        solution = dealt(pricer.trace, problem, solution, setting.virtual_stages)
    chosen = [d[o] for d, o in zip(per_call, solution.options, strict=True)]
    price = plan_price(pricer, setting, solution.ends, chosen)
    exact = [
        -(-(m.peak - cluster.reserved_bytes) // pricer.memory_unit)
        for m, cluster in zip(price.memory, stage_clusters(planner.cluster, setting), strict=True)
    ]
    return tuple(
        capacity + max(0, have - need)
        for capacity, have, need in zip(problem.capacity, linear, exact, strict=True)
    )


def pipeline_problem(
    planner: Planner, setting: Setting, is_sequence_parallel: bool = False
) -> tuple[PipelineProblem, list[tuple[Decision, ...]]]:
    """Return the pipeline problem of a setting, and the decisions of each of its calls.

    With `is_sequence_parallel` activations cross the borders of blocks, and of stages, as slices
    of tokens, one per tensor-parallel rank.
    """
    pricer = planner.pricer(setting.microbatch_size)
    per_call = [
        pricer.decisions(call.block, setting.tp, is_sequence_parallel=is_sequence_parallel)
        for call in pricer.trace.calls
    ]
    runs: list[Run] = []
    previous: Any = None
    for call, options in enumerate(_options(pricer, setting, per_call)):
        key = (pricer.trace.calls[call].block, options)
        if runs and key == previous:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(Run(count=1, options=options))
        previous = key
    fastest = [decisions[0] for decisions in per_call]
    return _pipeline(planner, setting, tuple(runs), fastest, is_sequence_parallel), per_call


def _options(
    pricer: Pricer, setting: Setting, per_call: Sequence[Sequence[Decision]]
) -> list[tuple[BlockOption, ...]]:
    """Return the options of each call, computed once for calls of a kind."""
    live = setting.live()
    found: list[tuple[BlockOption, ...]] = [()] * len(per_call)
    for calls in alike(pricer, setting):
        first = calls[0]
        alive = live[-1] if first == len(per_call) - 1 else live[0]
        options = tuple(
            _by_rank(block_option(pricer, first, decision, setting, alive), setting)
            for decision in per_call[first]
        )
        for call in calls:
            found[call] = options
    return found


def _by_rank(option: BlockOption, setting: Setting) -> BlockOption:
    """Return an option in the ticks of `_solved`."""
    if setting.virtual_stages == 1:
        return option
    return replace(option, once=option.once * setting.virtual_stages)


def _even_ends(trace: Trace, setting: Setting) -> tuple[int, ...]:
    """Return even ends of the ranks' shares."""
    if setting.virtual_stages > 1:
        return even_rank_ends(trace, setting.pp)
    return even_stage_ends(trace, setting.pp)


def _pipeline(
    planner: Planner,
    setting: Setting,
    runs: tuple[Run, ...],
    fastest: Sequence[Decision],
    is_sliced: bool,
) -> PipelineProblem:
    pricer, live = planner.pricer(setting.microbatch_size), setting.live()
    unit = pricer.memory_unit
    num_calls = len(pricer.trace.calls)
    crossing = max(pricer.trace.crossing_bytes, default=0) if setting.pp > 1 else 0
    if is_sliced:
        crossing = -(-crossing // setting.tp)
    side = side_bytes(pricer, range(num_calls), fastest, setting.tp)
    grain, once_grain = _grains(runs, setting)
    fixed, boundary = [], []
    v = setting.virtual_stages
    cuts = range(1, num_calls) if setting.pp > 1 else ()
    cuts_s = [pricer.boundary_s(setting, cut, is_sliced=is_sliced) for cut in cuts]
    for stage in range(setting.pp):
        transfer = crossing * v * _transfer_copies(setting, stage, live[stage])
        nbytes = side * v * live[stage] + batch_bytes(pricer.trace, setting) + transfer
        fixed.append(-(-nbytes // unit))
        seconds = 2 * v * pricer.action_s(setting)
        if v > 1:  # where a rank's stages are cut is only known once they are dealt
            neighbours = 2 * v - (stage == 0) - (stage == setting.pp - 1)
            seconds += neighbours * max(cuts_s)
        boundary.append(to_ticks(seconds))
    return PipelineProblem(
        runs=runs,
        num_microbatches=setting.num_microbatches * v,
        live=live,
        capacity=tuple(
            cluster.capacity_bytes // unit for cluster in stage_clusters(planner.cluster, setting)
        ),
        slowness=_slowness(planner, setting, pricer),
        fixed=tuple(fixed),
        boundary=tuple(boundary),
        crossing=tuple(map(to_ticks, cuts_s)) if v == 1 else (),
        grain=grain,
        once_grain=once_grain,
        cut_allowed=_cuts(planner, setting, pricer.trace),
        min_blocks=v,
        anchors=holders(pricer.trace) if setting.pp > 1 else (),
    )


def stage_clusters(cluster: Cluster, setting: Setting) -> tuple[Cluster, ...]:
    """Return the cluster as each stage sees it."""
    return tuple(cluster.on_stage(setting, stage) for stage in range(setting.pp))


def _slowness(planner: Planner, setting: Setting, pricer: Pricer) -> tuple[int, ...]:
    """Return per stage the time of its type of device, relative to the first; empty if alike."""
    if not planner.cluster.slower:
        return ()
    return tuple(
        round(SLOWNESS_UNIT * pricer.slowness(setting, stage)) for stage in range(setting.pp)
    )


def _grains(runs: Sequence[Run], setting: Setting) -> tuple[int, int]:
    """Return ticks of a stage's time and once that are not told apart; 1 where blocks are few.

    Long chains have so many mixes of almost equal time that to tell them apart would take longer
    than a step that is slower by the grain is worth.
    """
    if sum(run.count for run in runs) <= _MOST_EXACT_BLOCKS:
        return 1, 1
    total = sum(run.count * min(o.forward + o.backward for o in run.options) for run in runs)
    stage = total // setting.pp
    steps = setting.num_microbatches * setting.virtual_stages + setting.pp - 1
    return max(1, stage >> _GRAIN_BITS), max(1, stage * steps >> _ONCE_GRAIN_BITS)


def _cuts(planner: Planner, setting: Setting, trace: Trace) -> tuple[bool, ...]:
    """Return which positions between blocks may end a stage or a rank's share; empty: all."""
    if planner.even_cuts:
        ends = _even_ends(trace, setting)
        return tuple(position in ends for position in range(1, len(trace.calls)))
    if setting.virtual_stages > 1:
        return rank_cuts(trace, setting.pp, setting.virtual_stages)
    return ()


def _transfer_copies(setting: Setting, stage: int, live: int) -> int:
    """Return how many micro-batches' worth of activations lie at a stage's borders at most.

    Receive buffers that are no kept activations, stage outputs until their backward, and the
    gradient on its way back; see docs/design/memory-of-fsdp.md.
    """
    m = setting.num_microbatches
    if setting.virtual_stages > 1:
        # At most: rings are as large as two rounds, sent gradients as one.
        return max(0, 2 * setting.pp - live) + 1 + setting.pp + 2 + live
    entering = (m if setting.schedule == "gpipe" else live) - live + 1 if stage > 0 else 0
    gradients = m if setting.schedule == "gpipe" else min(2, m)
    leaving = gradients + live if stage < setting.pp - 1 else 0
    return entering + leaving
