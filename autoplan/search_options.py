"""Decisions of a block as the linear search sees them: whole numbers, upper estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.decision_tables import Ints
from autoplan.frontiers import Decision
from autoplan.resident import static_bytes, uses_fsdp
from autoplan.search.problem import BlockOption
from autoplan.settings import Setting
from autoplan.units import to_ticks

__all__ = ["CallBytes", "alike", "block_options", "call_bytes", "least_option"]


def block_options(
    pricer: Pricer, call: int, decisions: Sequence[Decision], setting: Setting, live: int
) -> tuple[BlockOption, ...]:
    """Return decisions as the linear search sees them: every number an upper estimate.

    Memory is in units of `memory_unit`, time in ticks of a nanosecond. The last block of the
    chain runs its backward first, so what it keeps counts as working memory only.
    """
    is_last = call == len(pricer.trace.calls) - 1
    shared = _shared(pricer, call, setting)
    block = pricer.trace.calls[call].block
    if setting.schedule == "interleaved":  # a block costs the same in any stage of a rank
        setting = replace(setting, schedule="1f1b", virtual_stages=1)
    key = (block, *map(id, decisions), setting, is_last and live, shared)
    if key not in pricer.options:
        pricer.options[key] = _make_options(pricer, call, decisions, setting, live)
    return pricer.options[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBytes:
    """What a call holds by the linear memory, upper estimates in bytes: arrays [decision].

    Attributes:
        kept: of every micro-batch that is alive.
        static: all the time.
        working: while it runs.
    """

    kept: Ints
    static: Ints
    working: Ints


def _make_options(
    pricer: Pricer, call: int, decisions: Sequence[Decision], setting: Setting, live: int
) -> tuple[BlockOption, ...]:
    seconds, unit = pricer.seconds(call, decisions, setting), pricer.memory_unit
    held = call_bytes(pricer, call, decisions, setting, live)
    columns = (
        [to_ticks(s) for s in seconds.forward_s.tolist()],
        [to_ticks(s) for s in seconds.backward_s.tolist()],
        [to_ticks(s) for s in seconds.once_s.tolist()],
        (-(-held.kept // unit)).tolist(),
        (-(-held.static // unit)).tolist(),
        (-(-held.working // unit)).tolist(),
    )
    return tuple(
        BlockOption(
            forward=forward,
            backward=backward,
            once=once,
            kept=kept,
            static=static,
            working=working,
        )
        for forward, backward, once, kept, static, working in zip(*columns, strict=True)
    )


def call_bytes(
    pricer: Pricer, call: int, decisions: Sequence[Decision], setting: Setting, live: int
) -> CallBytes:
    """Return what a call holds by the linear memory; `live` as in `block_options`."""
    kind = pricer.trace.calls[call].block
    table, is_glue = pricer.table(kind, decisions, setting.tp), pricer.trace.blocks[kind].is_glue
    groups = pricer.groups.own_of_each(call, table, setting)
    optimizer = pricer.workload.optimizer
    wrapped = uses_fsdp(setting, pricer.workload.mixed_precision != "none")
    static = [static_bytes(group, setting, optimizer) for group in groups.distinct]
    resident = np.array([own.parameters + own.optimizer for own in static])[groups.places]
    grads, kept = np.array([own.gradients for own in static])[groups.places], table.kept
    if setting.schedule == "zero_bubble":  # held until its gradients of parameters are there
        kept = kept + table.deferred_bytes
    working = table.transient
    gathered = groups.ints(lambda group: group.gathered)
    gathered_grads = groups.ints(lambda group: group.gathered_grads)
    if not wrapped:
        if setting.num_microbatches > 1:
            working = np.maximum(working, table.accumulating_transient)
    elif setting.zero_stage <= 1:
        # Gradients stay whole until the last micro-batch, in the dtype in which they are reduced.
        is_mixed = pricer.workload.mixed_precision != "none"
        resident = resident + gathered + (gathered_grads if is_glue else 0)
        reduced = groups.ints(lambda group: group.trained) if is_mixed else gathered_grads
        grads = np.maximum(grads, reduced)
        working = working + (0 if is_glue else gathered_grads)
    elif is_glue:
        resident = resident + gathered + gathered_grads
    elif setting.zero_stage == 2:
        resident = resident + gathered
        working = working + gathered_grads
    else:
        working = working + 2 * gathered + gathered_grads
        if setting.offload != "none":
            working = working - -groups.ints(lambda group: group.stored) // setting.dp
    is_last = call == len(pricer.trace.calls) - 1
    if is_last and live == 1 and setting.schedule != "gpipe":
        working, kept = working + kept, np.zeros_like(kept)
    if setting.num_microbatches == 1 and not wrapped and not is_last:
        kept, grads = np.maximum(kept, grads), np.zeros_like(grads)
    return CallBytes(kept=kept, static=resident + grads, working=working)


def least_option(
    pricer: Pricer, call: int, convention: Convention, setting: Setting
) -> BlockOption:
    """Return an option that no decision under a convention beats in time, once and static memory.

    Nothing of it needs a walk of what the decisions keep, so it is cheap. The first and the last
    block of a detour count as their mean.
    """
    shared = _shared(pricer, call, setting)
    block = pricer.trace.calls[call].block
    key = (block, convention.is_sequence_parallel, convention.of(block), setting, shared)
    if key not in pricer.least:
        decisions = pricer.decisions(block, setting.tp, convention)
        least = _least_of(pricer, call, decisions, setting)
        for detour in pricer.detour_decisions(block, setting.tp, convention):
            ways = (detour.first, detour.inner, detour.last)
            first, inner, last = (_least_of(pricer, call, own, setting) for own in ways)
            least = _lesser(least, _lesser(inner, _mean(first, last)))
        pricer.least[key] = least
    return pricer.least[key]


def _least_of(
    pricer: Pricer, call: int, decisions: Sequence[Decision], setting: Setting
) -> BlockOption:
    seconds = pricer.seconds(call, decisions, setting)
    table = pricer.table(pricer.trace.calls[call].block, decisions, setting.tp)
    both = zip(seconds.forward_s.tolist(), seconds.backward_s.tolist(), strict=True)
    static = [
        held.parameters + held.optimizer
        for group in pricer.groups.own_of_each(call, table, setting).distinct
        for held in (static_bytes(group, setting, pricer.workload.optimizer),)
    ]
    return BlockOption(
        forward=min(to_ticks(forward) + to_ticks(backward) for forward, backward in both),
        backward=0,
        once=to_ticks(min(seconds.once_s.tolist())),
        kept=0,
        static=min(static) // pricer.memory_unit,
        working=0,
    )


def _lesser(one: BlockOption, other: BlockOption) -> BlockOption:
    """Return what neither option is below in time, once and static memory."""
    return replace(
        one,
        forward=min(one.forward, other.forward),
        once=min(one.once, other.once),
        static=min(one.static, other.static),
    )


def _mean(one: BlockOption, other: BlockOption) -> BlockOption:
    """Return half of what two options take together, rounded down."""
    return replace(
        one,
        forward=(one.forward + other.forward) // 2,
        once=(one.once + other.once) // 2,
        static=(one.static + other.static) // 2,
    )


def alike(pricer: Pricer, setting: Setting) -> list[list[int]]:
    """Return the calls of each kind that `block_options` tells apart."""
    is_whole = setting.pp == 1
    if is_whole not in pricer.alike:
        kinds: dict[tuple[object, ...], list[int]] = {}
        for call, trace_call in enumerate(pricer.trace.calls):
            is_last = call == len(pricer.trace.calls) - 1
            kind = (trace_call.block, is_last, _shared(pricer, call, setting))
            kinds.setdefault(kind, []).append(call)
        pricer.alike[is_whole] = list(kinds.values())
    return pricer.alike[is_whole]


def _shared(pricer: Pricer, call: int, setting: Setting) -> frozenset[str]:
    """Return the parameters of a call that calls before it on its stage have, where that is known.

    With several stages the cuts decide.
    """
    return pricer.groups.shared_before(call) if setting.pp == 1 else frozenset()
