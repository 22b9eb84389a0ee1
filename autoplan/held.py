"""What all ranks of a setting hold at the least, before anything is cut or decided.

    held >= sum over calls of  min over decisions of  states[d] + alive * kept[d]
    held >= sum over calls of  min over decisions of  stepped[d]

`states` are parameters and optimizer states, each once, and gradients where micro-batches follow
the first backward of every rank; `kept` is what a micro-batch keeps, without results that the next
block may keep as its inputs; `alive` are the micro-batches of the rank that has fewest. `stepped`
is there when the optimizer steps: parameters, optimizer states and all gradients, and a temporary
of the size of the trained parameters where it steps on all of them at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan.cluster import Cluster
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.resident import static_bytes
from autoplan.search_options import alike
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["least_held_bytes", "mean_room", "static_need"]


def mean_room(cluster: Cluster, setting: Setting) -> int:
    """Return the bytes that stages of a setting may use on a device, in the mean over them."""
    if not cluster.slower:
        return cluster.capacity_bytes
    stages = range(setting.pp)
    return sum(cluster.on_stage(setting, stage).capacity_bytes for stage in stages) // setting.pp


def static_need(planner: Planner, setting: Setting) -> int:
    """Return bytes that stages need when the optimizer steps at least, in the mean over them.

    As if every parameter, gradient and optimizer state were divided by every degree.
    """
    if setting.offload != "none":
        return 0
    if planner.state_bytes is None:
        planner.state_bytes = _stepped_bytes(planner)
    return planner.state_bytes // (setting.shards * setting.tp * setting.pp)


def _stepped_bytes(planner: Planner) -> int:
    """Return bytes of all that is there when the optimizer steps, undivided, each once."""
    trace = planner.smallest_trace()
    ratio = planner.workload.parameter_bytes_per_traced_byte
    canonical = trace.first_names()
    sizes: dict[str, float] = {}
    for call in trace.calls:
        for state, fqn in zip(trace.blocks[call.block].states, call.states, strict=True):
            trained = state.nbytes * ratio * state.is_trained
            held = state.nbytes * (ratio if state.is_parameter else 1)
            sizes[canonical.get(fqn, fqn)] = held + trained * _per_trained(planner.workload)
    return int(sum(sizes.values()))


def _per_trained(workload: Workload) -> float:
    """Return bytes of gradients, states and temporaries per trained byte as the optimizer steps."""
    optimizer, engine = workload.optimizer, workload.engine
    has_gradients = not (engine.has_gradient_buffer or engine.steps_in_backward)
    return optimizer.state_bytes_per_byte + has_gradients * (1 + optimizer.is_foreach)


def least_held_bytes(
    pricer: Pricer, setting: Setting, convention: Convention, *, has_detours: bool
) -> int:
    """Return bytes below which all ranks of a pipeline together do not hold at their fullest.

    `has_detours`: blocks may take the decisions of their detours too.
    """
    alone = replace(setting, pp=1)  # shared parameters count once
    alive, optimizer = min(setting.alive()), pricer.workload.optimizer
    has_gradients = setting.num_microbatches > setting.pp
    total = stepped = 0.0
    for calls in alike(pricer, alone):
        is_last = calls[0] == len(pricer.trace.calls) - 1
        ways, steps = [], []
        for group, kept in _least_kept(pricer, calls[0], alone, convention, has_detours).items():
            held = static_bytes(group, setting, optimizer)
            states = held.parameters + held.optimizer
            ways.append(states + has_gradients * held.gradients + (0 if is_last else alive * kept))
            steps.append(states + held.gradients * (1 + optimizer.is_foreach))
        total += len(calls) * min(ways)
        stepped += len(calls) * min(steps)
    # The temporary of all groups together is rounded up once, as if it were one.
    return int(max(total, stepped - optimizer.is_foreach * len(pricer.trace.calls)))


def _least_kept(
    pricer: Pricer, call: int, alone: Setting, convention: Convention, has_detours: bool
) -> dict[GroupBytes, int]:
    """Return by the parameters of a call the least that its decisions keep of a micro-batch."""
    block = pricer.trace.calls[call].block
    is_split = alone.schedule == "zero_bubble"
    key = (call, alone.tp, convention, is_split, has_detours)
    if key not in pricer.least_kept:
        found: dict[GroupBytes, int] = {}
        decisions = list(pricer.decisions(block, alone.tp, convention))
        for detour in pricer.detour_decisions(block, alone.tp, convention) if has_detours else ():
            decisions += (*detour.first, *detour.inner, *detour.last)
        for decision in decisions:
            work = pricer.base(block, decision, alone.tp)
            less = work.memory.held_output_bytes
            if is_split:
                less += work.deferred.released_bytes
            group = pricer.groups.own(call, decision, alone)
            kept = max(0, work.memory.kept - less)
            found[group] = min(found.get(group, kept), kept)
        pricer.least_kept[key] = found
    return pricer.least_kept[key]
