"""Bounds of a setting before it is solved, and reasons why it cannot be."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from autoplan.frontiers import fastest_ops_s
from autoplan.graph import ParameterTrace, Placement, Trace
from autoplan.layout_check import fsdp_can_slice
from autoplan.schedules import enough_rounds, in_flight
from autoplan.search.candidates import Refinement
from autoplan.search_options import alike, block_option, least_option
from autoplan.settings import Setting
from autoplan.units import TICK_S, format_bytes

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = [
    "blocks_bound",
    "frontiers_bound",
    "layout_reason",
    "memory_bound",
    "ops_bound",
    "static_reason",
    "strided_states",
]

_TWO_PIECES = Placement(kind="shard", dim=0, outer=2)


def ops_bound(planner: Planner, setting: Setting) -> int:
    """Return ticks below which no plan of the setting is: every op at its fastest."""
    key = (setting.tp, setting.microbatch_size)
    if key not in planner.ops_bounds:
        pricer = planner.pricer(setting.microbatch_size)
        timer = pricer.timer(setting.tp)
        by_block = [fastest_ops_s(block, timer) for block in pricer.trace.blocks]
        seconds = [by_block[call.block] for call in pricer.trace.calls]
        planner.ops_bounds[key] = (sum(seconds), max(seconds))
    return _bound(setting, *planner.ops_bounds[key])


def _bound(setting: Setting, total: float, slowest: float) -> int:
    """Return ticks below which no step is whose blocks take `total` and at most `slowest` s."""
    return int(_step(setting, total, max(slowest, total / setting.pp)) / TICK_S * (1 - 1e-9))


def _step(setting: Setting, total: float, slowest: float) -> float:
    """Return the time of a step of ranks that take `total`, the slowest of them `slowest`."""
    others = (total - slowest) / setting.virtual_stages
    return setting.num_microbatches * slowest + others


def layout_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why FSDP cannot slice what tensor parallelism stores under a setting, or None."""
    if setting.tp > 1 and setting.dp > 1 and setting.zero_stage > 0:
        for state in strided_states(planner.smallest_trace()):
            if not fsdp_can_slice(state.shape, _TWO_PIECES, setting.dp_shard):
                return f"FSDP over {setting.dp_shard} ranks cannot slice {state.fqn} beside tp"
    return None


def static_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why a setting cannot be, whatever is decided about its blocks, or None.

    Parameters and optimizer state must fit, counted in shards that divide by every degree and
    without activations; and the layout must be one that can be run.
    """
    trace = planner.smallest_trace()
    unrunnable = layout_reason(planner, setting) or _unlike_reason(planner, setting)
    if unrunnable is not None:
        return unrunnable
    if setting.offload != "none":
        return None
    ratio = planner.workload.parameter_bytes_per_traced_byte
    canonical = {fqn: group[0] for group in trace.shared for fqn in group}
    sizes: dict[str, int] = {}
    for call in trace.calls:
        for state, fqn in zip(trace.blocks[call.block].states, call.states, strict=True):
            factor = 1 + planner.workload.optimizer.state_bytes_per_byte * state.is_trained
            sizes[canonical.get(fqn, fqn)] = int(state.nbytes * ratio * factor)
    shards = setting.shards
    need = sum(sizes.values()) // (shards * setting.tp * setting.pp)
    capacity = _most_bytes(planner, setting)
    if need <= capacity:
        return None
    return (
        f"parameters and optimizer state alone need {format_bytes(need)} a device, it has "
        f"{format_bytes(capacity)}"
    )


def _unlike_reason(planner: Planner, setting: Setting) -> str | None:
    """Return why a setting would put unlike devices into one stage, or None."""
    try:
        for stage in range(setting.pp):
            planner.cluster.on_stage(setting, stage)
    except ValueError as error:
        return str(error)
    return None


def _most_bytes(planner: Planner, setting: Setting) -> int:
    """Return the most bytes that a stage of the setting may use on a device."""
    return max(planner.cluster.on_stage(setting, s).capacity_bytes for s in range(setting.pp))


def blocks_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from the fastest way to run each block alone, whatever memory it takes."""
    pricer = planner.pricer(setting.microbatch_size)
    bounds = []
    for is_sliced in pricer.borders(setting.tp):
        seconds = [
            pricer.fastest_s(call.block, setting.tp, is_sequence_parallel=is_sliced)
            for call in pricer.trace.calls
        ]
        bounds.append(_bound(setting, sum(seconds), max(seconds)))
    return Refinement(bound=min(bounds))


def frontiers_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from the decisions of each block under the setting, or why nothing fits."""
    pricer = planner.pricer(setting.microbatch_size)
    found = [_border_bound(planner, setting, is_sliced) for is_sliced in pricer.borders(setting.tp)]
    possible = [refinement for refinement in found if refinement.infeasible is None]
    return min(possible, key=lambda refinement: refinement.bound) if possible else found[0]


def _border_bound(planner: Planner, setting: Setting, is_sequence_parallel: bool) -> Refinement:
    pricer = planner.pricer(setting.microbatch_size)
    total, slowest, once, static = 0, 0, 0, 0
    for calls in alike(pricer, setting):
        call, count = calls[0], len(calls)
        block = pricer.trace.calls[call].block
        decisions = pricer.decisions(block, setting.tp, is_sequence_parallel=is_sequence_parallel)
        least = least_option(pricer, call, decisions, setting)
        total += count * least.forward
        slowest = max(slowest, least.forward)
        once += count * least.once
        static += count * least.static
    unit = pricer.memory_unit
    capacity = _most_bytes(planner, setting) // unit
    if static > capacity * setting.pp:
        need = static * unit // setting.pp
        return Refinement(
            infeasible=f"parameters and optimizer state alone need {format_bytes(need)} a device"
        )
    if setting.pp > 1:
        total += int(_borders_s(planner, setting, is_sequence_parallel) / TICK_S)
    step = _step(setting, total, max(slowest, total / setting.pp))
    return Refinement(bound=int(step * (1 - 1e-9)) + -(-once // setting.pp))


def _borders_s(planner: Planner, setting: Setting, is_sliced: bool) -> float:
    """Return seconds that all stages together pass at their borders with a micro-batch at least."""
    pricer = planner.pricer(setting.microbatch_size)
    crossing = pricer.trace.crossing_bytes
    cut = 1 + crossing.index(min(crossing))
    num_stages = setting.pp * setting.virtual_stages
    sends = (pricer.sent_s(setting, cut, s, is_sliced) for s in range(num_stages - 1))
    return 2 * (sum(sends) + num_stages * pricer.action_s(setting))


def memory_bound(planner: Planner, setting: Setting) -> Refinement:
    """Return a bound from what all ranks together can hold, or why nothing fits.

    The Lagrangian relaxation of the memory of all ranks as one, with the fewest micro-batches in
    flight that any of them has: time >= sum_b min_o (time + price * held) - price * room. What is
    held is counted low: parameters, gradients and states, and what a block keeps besides its
    inputs.
    """
    pricer = planner.pricer(setting.microbatch_size)
    v, unit = setting.virtual_stages, pricer.memory_unit
    if v == 1:
        return Refinement()
    enough = enough_rounds(setting.num_microbatches, setting.pp)
    live = min(sum(own) for own in in_flight(setting.schedule, setting.pp, enough, v)) / v
    room = setting.pp * (planner.cluster.capacity_bytes // unit)
    kinds: list[tuple[int, list[tuple[float, float]]]] = []
    for calls in alike(pricer, setting):
        call, count = calls[0], len(calls)
        block = pricer.trace.calls[call].block
        points = []
        decisions = (
            decision
            for is_sliced in pricer.borders(setting.tp)
            for decision in pricer.decisions(block, setting.tp, is_sequence_parallel=is_sliced)
        )
        for decision in decisions:
            option = block_option(pricer, call, decision, setting, setting.live()[-1])
            inputs = sum(pricer.base(block, decision, setting.tp).local.inputs.values())
            held = option.static + live * max(0, option.kept - -(-inputs // unit))
            points.append((held, float(option.forward + option.backward)))
        kinds.append((count, sorted(points)))
    if sum(count * points[0][0] for count, points in kinds) > room:
        return Refinement(
            infeasible=f"what {setting.pp} ranks hold at the least exceeds their memory together"
        )
    rates = {
        (slow - fast) / (more - less)
        for _, points in kinds
        for (less, slow), (more, fast) in combinations(points, 2)
        if more > less and slow > fast
    }
    total = max(
        sum(count * min(t + price * held for held, t in points) for count, points in kinds)
        - price * room
        for price in (0.0, *rates)
    )
    return Refinement(bound=int(_step(setting, total, total / setting.pp) * (1 - 1e-9)))


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
