"""Decisions of a block as the linear search sees them: whole numbers, upper estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.resident import static_bytes, uses_fsdp
from autoplan.search.problem import BlockOption
from autoplan.settings import Setting
from autoplan.units import to_ticks

__all__ = ["CallBytes", "alike", "block_option", "call_bytes", "least_option"]


def block_option(
    pricer: Pricer, call: int, decision: Decision, setting: Setting, live: int
) -> BlockOption:
    """Return a decision as the linear search sees it: every number an upper estimate.

    Memory is in units of `memory_unit`, time in ticks of a nanosecond. The last block of the
    chain runs its backward first, so what it keeps counts as working memory only.
    """
    is_last = call == len(pricer.trace.calls) - 1
    shared = _shared(pricer, call, setting)
    trace_call = pricer.trace.calls[call]
    if setting.schedule == "interleaved":  # a block costs the same in any stage of a rank
        setting = replace(setting, schedule="1f1b", virtual_stages=1)
    key = (trace_call.block, decision.key, setting, is_last and live, shared)
    if key not in pricer.options:
        pricer.options[key] = _make_option(pricer, call, decision, setting, live)
    return pricer.options[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBytes:
    """What a call holds by the linear memory, upper estimates in bytes.

    Attributes:
        kept: of every micro-batch that is alive.
        static: all the time.
        working: while it runs.
    """

    kept: int
    static: int
    working: int


def _make_option(
    pricer: Pricer, call: int, decision: Decision, setting: Setting, live: int
) -> BlockOption:
    price, unit = pricer.price(call, decision, setting), pricer.memory_unit
    held = call_bytes(pricer, call, decision, setting, live)
    return BlockOption(
        forward=to_ticks(price.forward_s),
        backward=to_ticks(price.backward_s),
        once=to_ticks(price.once_s),
        kept=-(-held.kept // unit),
        static=-(-held.static // unit),
        working=-(-held.working // unit),
    )


def call_bytes(
    pricer: Pricer, call: int, decision: Decision, setting: Setting, live: int
) -> CallBytes:
    """Return what a call holds by the linear memory; `live` as in `block_option`."""
    kind = pricer.trace.calls[call].block
    work, is_glue = pricer.base(kind, decision, setting.tp), pricer.trace.blocks[kind].is_glue
    group, memory = pricer.own_group(call, decision, setting), work.memory
    static = static_bytes(group, setting, pricer.workload.optimizer)
    wrapped = uses_fsdp(setting, pricer.workload.mixed_precision != "none")
    resident = static.parameters + static.optimizer
    grads, kept = static.gradients, memory.kept
    if setting.schedule == "zero_bubble":  # held until its gradients of parameters are there
        kept += work.deferred.nbytes
    working = max(
        memory.backward_peak - memory.kept,
        sum(work.local.inputs.values()) + memory.forward_peak - memory.kept,
    )
    if not wrapped:
        if setting.num_microbatches > 1:
            working = max(working, work.accumulating.backward_peak - memory.kept)
    elif setting.zero_stage <= 1:
        # Gradients stay whole until the last micro-batch, in the dtype in which they are reduced.
        is_mixed = pricer.workload.mixed_precision != "none"
        resident += group.gathered + (group.gathered_grads if is_glue else 0)
        grads = max(grads, group.trained if is_mixed else group.gathered_grads)
        working += 0 if is_glue else group.gathered_grads
    elif is_glue:
        resident += group.gathered + group.gathered_grads
    elif setting.zero_stage == 2:
        resident += group.gathered
        working += group.gathered_grads
    else:
        working += 2 * group.gathered + group.gathered_grads
        if setting.offload != "none":
            working += -(-group.stored // setting.dp)
    is_last = call == len(pricer.trace.calls) - 1
    if is_last and live == 1 and setting.schedule != "gpipe":
        working, kept = working + kept, 0
    if setting.num_microbatches == 1 and not wrapped and not is_last:
        kept, grads = max(kept, grads), 0
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
    if key not in pricer.options:
        decisions = pricer.decisions(block, setting.tp, convention)
        least = _least_of(pricer, call, decisions, setting)
        for detour in pricer.detour_decisions(block, setting.tp, convention):
            ways = (detour.first, detour.inner, detour.last)
            first, inner, last = (_least_of(pricer, call, own, setting) for own in ways)
            least = _lesser(least, _lesser(inner, _mean(first, last)))
        pricer.options[key] = least
    return pricer.options[key]


def _least_of(
    pricer: Pricer, call: int, decisions: Sequence[Decision], setting: Setting
) -> BlockOption:
    time, once, static = [], [], []
    for decision in decisions:
        price = pricer.price(call, decision, setting)
        group = pricer.own_group(call, decision, setting)
        held = static_bytes(group, setting, pricer.workload.optimizer)
        time.append(to_ticks(price.forward_s) + to_ticks(price.backward_s))
        once.append(to_ticks(price.once_s))
        static.append(held.parameters + held.optimizer)
    return BlockOption(
        forward=min(time),
        backward=0,
        once=min(once),
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
    """Return the calls of each kind that `block_option` tells apart."""
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
    return pricer.shared_before(call) if setting.pp == 1 else frozenset()
