"""Bounds of a setting before it is solved, and reasons why it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.frontiers import fastest_ops_s
from autoplan.graph import ParameterTrace, Placement, Trace
from autoplan.held import least_held_bytes, mean_room, static_need
from autoplan.interleaving import stage_counts
from autoplan.layout_check import fsdp_can_slice
from autoplan.search.candidates import Refinement
from autoplan.search.problem import Run
from autoplan.search.together import together_bound
from autoplan.search_options import alike, block_options, least_option
from autoplan.setting_problem import borders_s, split_saving, usable_decisions, with_detours
from autoplan.settings import Setting
from autoplan.shared_writes import changed_parameter_text, lost_under
from autoplan.split_steps import saved_at_most
from autoplan.units import TICK_S, format_bytes

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = [
    "LeastCalls",
    "blocks_bound",
    "convention_bound",
    "frontiers_bound",
    "held_excess",
    "layout_reason",
    "least_bound",
    "memory_bound",
    "ops_bound",
    "static_reason",
    "strided_states",
    "unrunnable_reason",
]

_TWO_PIECES = Placement(kind="shard", dim=0, outer=2)


def ops_bound(planner: Planner, setting: Setting) -> int:
    """Return ticks below which no plan of the setting is: every op at its fastest."""
    key = (setting.tp, setting.microbatch_size)
    if key not in planner.ops_bounds:
        pricer = planner.pricer(setting.microbatch_size)
        timer = pricer.layouts.timer(setting.tp)
        by_block = [fastest_ops_s(block, timer) for block in pricer.trace.blocks]
        seconds = [by_block[call.block] for call in pricer.trace.calls]
        planner.ops_bounds[key] = (sum(seconds), max(seconds))
    return _bound(setting, *planner.ops_bounds[key])


def _bound(setting: Setting, total: float, slowest: float) -> int:
    """Return ticks below which no step is whose blocks take `total` and at most `slowest` s."""
    return int(_step(setting, total, max(slowest, total / setting.pp)) / TICK_S * (1 - 1e-9))


def _step(setting: Setting, total: float, slowest: float, saved: float | None = None) -> float:
    """Return the time of a step of ranks that take `total`, the slowest of them `slowest`.

    `saved`: at most, because backwards are split; None: not known, and never above the share of
    `total` (see `split_steps`).
    """
    others = (total - slowest) / setting.virtual_stages
    if setting.schedule == "zero_bubble":
        others -= saved_at_most(total, setting) if saved is None else saved
    return setting.num_microbatches * slowest + others


def layout_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why FSDP cannot slice what tensor parallelism stores under a setting, or None."""
    if setting.tp > 1 and setting.dp > 1 and setting.zero_stage > 0:
        if planner.strided is None:
            planner.strided = strided_states(planner.smallest_trace())
        for state in planner.strided:
            if not fsdp_can_slice(state.shape, _TWO_PIECES, setting.dp_shard):
                return f"FSDP over {setting.dp_shard} ranks cannot slice {state.fqn} beside tp"
    return None


def static_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why a setting cannot be, whatever is decided about its blocks, or None.

    What the optimizer's step needs must fit (`static_need`), without activations; and the layout
    must be one that can be run.
    """
    unrunnable = unrunnable_reason(planner, setting)
    if unrunnable is not None:
        return unrunnable
    need, room = static_need(planner, setting), mean_room(planner.cluster, setting)
    if need <= room:
        return None
    return (
        f"parameters, gradients and optimizer state alone need {format_bytes(need)} a device, "
        f"which has {format_bytes(room)}" + " in the mean" * bool(planner.cluster.slower)
    )


def unrunnable_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why no plan of a setting can be run, whatever it takes, or None."""
    return (
        layout_reason(planner, setting)
        or _write_reason(planner, setting)
        or _changed_parameter_reason(planner, setting)
    )


def _changed_parameter_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why a parameter that the forward writes to, a moving copy, rules a setting out."""
    is_mixed = planner.workload.mixed_precision != "none"
    if setting.tp == 1 and setting.zero_stage == 0 and not is_mixed:
        return None
    trace = planner.smallest_trace()
    changed = {one.fqn for one in trace.changed}
    if not changed:
        return None
    for call in trace.calls:
        for state, fqn in zip(trace.blocks[call.block].states, call.states, strict=True):
            if state.is_parameter and fqn in changed:
                return changed_parameter_text(fqn)
    return None


def _write_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why a write to what enters a block would be lost under a setting, or None.

    Where only recomputation would lose it, its block has no decision that recomputes.
    """
    trace = planner.smallest_trace()
    is_mixed = planner.workload.mixed_precision != "none"
    for lost, reason in lost_under(
        trace.lost_writes, {}, pp=setting.pp, zero_stage=setting.zero_stage, is_mixed=is_mixed
    ):
        writer = trace.calls[lost.writer].fqn or "the code between blocks"
        return f"with {reason} {writer} writes to a copy of its input, and {lost.value} misses it"
    return None


def blocks_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from the fastest way to run each block alone, whatever memory it takes."""
    conventions = planner.pricer(setting.microbatch_size).conventions(setting.tp)
    return Refinement(bound=min(_alone(planner, setting, own) for own in conventions))


def _alone(planner: Planner, setting: Setting, convention: Convention) -> int:
    """Return ticks below which no step is, from the fastest way to run each block alone."""
    pricer = planner.pricer(setting.microbatch_size)
    key = (setting, convention)
    if key not in pricer.alone:
        pricer.alone[key] = _bound_alone(planner, setting, convention)
    return pricer.alone[key]


def _bound_alone(planner: Planner, setting: Setting, convention: Convention) -> int:
    seconds = _fastest_calls(planner.pricer(setting.microbatch_size), setting.tp, convention)
    bound = _bound(setting, sum(seconds), max(seconds))
    if setting.virtual_stages > 1:
        ticks = [s / TICK_S for s in seconds]
        is_sliced = convention.is_sequence_parallel
        borders = [s / TICK_S for s in _borders_s(planner, setting, is_sliced)]
        even = _even_step(planner, setting, ticks, borders)
        if setting.schedule == "zero_bubble":
            even -= saved_at_most(sum(ticks), setting)
        bound = max(bound, int(even * (1 - 1e-9)))
    return bound


def _fastest_calls(pricer: Pricer, tp: int, convention: Convention) -> list[float]:
    """Return the seconds of each call at its fastest."""
    if (tp, convention) not in pricer.fastest_calls:
        blocks = range(len(pricer.trace.blocks))
        by_block = [pricer.fastest_s(block, tp, convention) for block in blocks]
        pricer.fastest_calls[tp, convention] = [by_block[c.block] for c in pricer.trace.calls]
    return pricer.fastest_calls[tp, convention]


def frontiers_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from the decisions of each block under the setting, or why nothing fits."""
    for bound, _ in _by_promise(planner, setting):
        return Refinement(bound=bound)
    first = planner.pricer(setting.microbatch_size).conventions(setting.tp)[0]
    return convention_bound(planner, setting, first)


def _by_promise(planner: Planner, setting: Setting) -> Iterator[tuple[int, Convention]]:
    """Yield the conventions under which something may fit, with `convention_bound`, least first.

    One that is slower by its blocks alone is bounded only when it is its turn.
    """
    conventions = planner.pricer(setting.microbatch_size).conventions(setting.tp)
    if len(conventions) == 1:
        waiting = [(0, 0, False)]
    else:
        waiting = [(_alone(planner, setting, own), i, False) for i, own in enumerate(conventions)]
    heapify(waiting)
    while waiting:
        bound, index, is_final = heappop(waiting)
        if is_final:
            yield bound, conventions[index]
            continue
        found = convention_bound(planner, setting, conventions[index])
        if found.infeasible is None:
            heappush(waiting, (max(bound, found.bound), index, True))


def least_bound(
    planner: Planner,
    setting: Setting,
    bound_of: Callable[[Convention], int | None],
    *,
    is_quick: bool = False,
) -> int | None:
    """Return the least bound over all conventions, or None where none can be.

    Those that are slower by `convention_bound` than another is by `bound_of` are left out.

    Args:
        planner, setting: what is bounded.
        bound_of: ticks below which no plan under a convention is; None: there is none.
        is_quick: ask it for one convention only, the most promising that has a bound; all others
            count as `convention_bound` says.
    """
    least: int | None = None
    for cheap, convention in _by_promise(planner, setting):
        if least is not None and (cheap >= least or is_quick):
            return min(cheap, least)
        bound = bound_of(convention)
        if bound is not None:
            bound = max(bound, cheap)
            least = bound if least is None else min(least, bound)
    return least


def convention_bound(planner: Planner, setting: Setting, convention: Convention) -> Refinement:
    """Return a bound from the decisions of each block under a convention, or why nothing fits."""
    is_sliced = convention.is_sequence_parallel
    least = _least(planner, setting, convention)
    unit = planner.pricer(setting.microbatch_size).memory_unit
    if least.static > mean_room(planner.cluster, setting) * setting.pp // unit:
        need = least.static * unit // setting.pp
        return Refinement(
            infeasible=f"parameters and optimizer state alone need {format_bytes(need)} a device"
        )
    borders: list[float] = [0.0]
    if setting.pp > 1:
        borders = [s / TICK_S for s in _borders_s(planner, setting, is_sliced)]
    total, slowest = sum(least.times) + sum(borders), float(max(least.times))
    saved = split_saving(planner.pricer(setting.microbatch_size), setting, convention)
    step = _step(setting, total, max(slowest, total / setting.pp), saved)
    if setting.virtual_stages > 1:
        step = max(step, _even_step(planner, setting, least.times, borders) - saved)
    return Refinement(bound=int(step * (1 - 1e-9)) + -(-least.once // setting.pp))


def _even_step(
    planner: Planner, setting: Setting, times: Sequence[float], borders: Sequence[float]
) -> float:
    """Return ticks below which no step is with even stages of blocks that take `times` at least."""
    alike_run = planner.alike_run(setting.microbatch_size)
    run = alike_run.calls
    counts = stage_counts(alike_run, times, setting.pp, setting.virtual_stages)
    block = min(times[run.start : run.stop])
    first, *between, last = ([size * block for size in own] for own in counts)
    first[0] += sum(times[: run.start])
    last[-1] += sum(times[run.stop :])
    # Most ranks between the ends have the same stages, so each of those is looked at once.
    kinds = dict(zip(counts[1:-1], between, strict=True))
    sums = {own: sum(stages) for own, stages in kinds.items()}
    ranks = [sum(first), *(sums[own] for own in counts[1:-1]), sum(last)]
    ranks = [own + border for own, border in zip(ranks, borders, strict=True)]
    stages = zip(first, *kinds.values(), last, strict=True)
    pace: float = sum(max(own) for own in stages) + min(borders)
    others = (sum(ranks) - max(ranks)) / setting.virtual_stages
    return setting.num_microbatches * max(pace, *ranks) + others


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCalls:
    """What calls take and hold at the least under a setting, each alone.

    Attributes:
        times: ticks of a micro-batch per call.
        once: ticks of a step, all calls together.
        static: memory units of all calls together.
    """

    times: tuple[int, ...]
    once: int
    static: int


def _least(planner: Planner, setting: Setting, convention: Convention) -> LeastCalls:
    """Return the least of all calls: the same whatever the schedule and the stages a rank."""
    key = (replace(setting, schedule="none", virtual_stages=1), convention)
    if key not in planner.least:
        pricer = planner.pricer(setting.microbatch_size)
        times = [0] * len(pricer.trace.calls)
        once = static = 0
        for calls in alike(pricer, setting):
            least = least_option(pricer, calls[0], convention, key[0])
            once += len(calls) * least.once
            static += len(calls) * least.static
            for call in calls:
                times[call] = least.forward
        planner.least[key] = LeastCalls(times=tuple(times), once=once, static=static)
    return planner.least[key]


def _borders_s(planner: Planner, setting: Setting, is_sliced: bool) -> list[float]:
    """Return seconds that each rank passes at its borders with a micro-batch at least.

    They do not depend on the ZeRO stage, its replicas, or the number of micro-batches.
    """
    pricer = planner.pricer(setting.microbatch_size)
    degrees = (setting.dp, setting.tp, setting.pp, setting.axis_order)
    scheduled = (setting.schedule, setting.virtual_stages)
    key = (degrees, scheduled, setting.microbatch_size, is_sliced)
    if key not in planner.borders_s:
        crossing = pricer.trace.crossing_bytes
        cut = 1 + crossing.index(min(crossing))
        planner.borders_s[key] = borders_s(pricer, setting, cut, is_sliced)
    return planner.borders_s[key]


def memory_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from what all ranks together can hold, or why nothing fits.

    Without a pipeline the relaxation of the one stage is as cheap. What is held is counted low:
    parameters, gradients and states, and what a block keeps besides results that the next one may
    keep as its inputs.
    """
    reason = held_reason(planner, setting)
    if reason is not None or setting.pp == 1:
        return Refinement(infeasible=reason)
    bound = least_bound(planner, setting, lambda own: _together(planner, setting, own))
    if bound is None:
        return Refinement(
            infeasible=f"what {setting.pp} ranks hold at the least exceeds their memory together"
        )
    return Refinement(bound=bound)


def held_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why no decisions fit, by what all ranks hold together, or None."""
    excess = held_excess(planner, setting, has_detours=True)
    if excess <= 0:
        return None
    return f"what its ranks hold at the least exceeds their memory by {format_bytes(excess)} each"


def held_excess(planner: Planner, setting: Setting, *, has_detours: bool = False) -> int:
    """Return bytes by which ranks exceed their memory at the least, in the mean over a pipeline.

    `has_detours`: where blocks may take the decisions of their detours too.
    """
    pricer = planner.pricer(setting.microbatch_size)
    held = min(
        least_held_bytes(pricer, setting, convention, has_detours=has_detours)
        for convention in pricer.conventions(setting.tp)
    )
    return held // setting.pp - mean_room(planner.cluster, setting)


def _together(planner: Planner, setting: Setting, convention: Convention) -> int | None:
    """Return the bound under one convention, None if nothing fits."""
    pricer = planner.pricer(setting.microbatch_size)
    unit, v = pricer.memory_unit, setting.virtual_stages
    live = setting.live()
    runs = []
    for calls in alike(pricer, setting):
        call = calls[0]
        block = pricer.trace.calls[call].block
        plain = usable_decisions(pricer, block, setting, convention)
        decisions, detours = with_detours(pricer, block, setting, convention, plain)
        table = pricer.table(block, decisions, setting.tp)
        less = table.held_output_bytes
        if setting.schedule == "zero_bubble":
            less = less + table.deferred_bytes + table.released_bytes
        found = block_options(pricer, call, decisions, setting, live[-1])
        options = [
            replace(option, kept=max(0, option.kept - shared), once=v * option.once)
            for option, shared in zip(found, (-(-less // unit)).tolist(), strict=True)
        ]
        runs.append(Run(count=len(calls), options=tuple(options), detours=detours))
    clusters = [planner.cluster.on_stage(setting, stage) for stage in range(setting.pp)]
    bound = together_bound(
        runs,
        setting.alive(),
        [cluster.capacity_bytes // unit for cluster in clusters],
        [int(s / TICK_S) for s in _borders_s(planner, setting, convention.is_sequence_parallel)],
        setting.num_microbatches * v,
    )
    if bound is None:
        return None
    return max(0, bound // v - split_saving(pricer, setting, convention))


def strided_states(trace: Trace) -> list[ParameterTrace]:
    """Return matrices that some op can slice along dimension 0 in several pieces, once each."""
    found: dict[tuple[str, tuple[int, ...]], ParameterTrace] = {}
    for block in trace.blocks:
        states = {s.name: s for s in block.states if s.is_parameter and len(s.shape) > 1}
        for op in block.ops:
            for option in op.options:
                for name, text in zip(op.inputs, option.inputs, strict=False):
                    placement = Placement.parse(text)
                    if name in states and placement.dim == 0 and placement.outer > 1:
                        found[states[name].fqn, states[name].shape] = states[name]
    return list(found.values())
