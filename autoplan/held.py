"""What all ranks of a setting hold at the least, before anything is cut or decided.

    held >= sum over calls of  min over decisions of  states[d] + alive * kept[d]

`states` are parameters and optimizer states, each once, and gradients where micro-batches follow
the first backward of every rank; `kept` is what a micro-batch keeps, without results that the next
block may keep as its inputs; `alive` are the micro-batches of the rank that has fewest.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.resident import static_bytes
from autoplan.search_options import alike
from autoplan.settings import Setting
from autoplan.stage_costs import GroupBytes

__all__ = ["least_held_bytes"]


def least_held_bytes(
    pricer: Pricer, setting: Setting, convention: Convention, *, has_detours: bool
) -> int:
    """Return bytes below which all ranks of a pipeline together do not hold at their fullest.

    `has_detours`: blocks may take the decisions of their detours too.
    """
    alone = replace(setting, pp=1)  # shared parameters count once
    alive, optimizer = min(setting.alive()), pricer.workload.optimizer
    has_gradients = setting.num_microbatches > setting.pp
    total = 0.0
    for calls in alike(pricer, alone):
        is_last = calls[0] == len(pricer.trace.calls) - 1
        ways = []
        for group, kept in _least_kept(pricer, calls[0], alone, convention, has_detours).items():
            held = static_bytes(group, setting, optimizer)
            states = held.parameters + held.optimizer + has_gradients * held.gradients
            ways.append(states + (0 if is_last else alive * kept))
        total += len(calls) * min(ways)
    return int(total)


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
