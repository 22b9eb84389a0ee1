"""Gather what a simulation of a decided plan needs: each block's seconds and bytes, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.border_seconds import action_s, sent_s
from autoplan.call_prices import host_seconds, overlaps, zero_seconds
from autoplan.costs import Pricer
from autoplan.deferral import stage_backward
from autoplan.frontiers import Decision
from autoplan.settings import Setting
from autoplan.stage_bytes import batch_bytes, part_bytes, stage_blocks
from autoplan.stage_costs import BlockCosts, BlockSeconds, PlanCosts, StageCosts
from autoplan.step_costs import data_parallel_link, interference, regathers, slowdown_s

__all__ = ["plan_costs"]


def plan_costs(
    pricer: Pricer, setting: Setting, ends: Sequence[int], decisions: Sequence[Decision]
) -> PlanCosts:
    """Return the costs of a plan's stages.

    Args:
        pricer: of the plan's micro-batch size.
        setting: degrees and sizes.
        ends: per stage the index after its last call.
        decisions: one per call.
    """
    names: dict[BlockCosts, str] = {}
    spans = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    stages = []
    for stage, calls in enumerate(spans):
        on_stage = pricer.on_stage(setting, stage % setting.pp)
        chosen = [decisions[c] for c in calls]
        how = stage_backward(pricer.trace, calls)
        sizes = stage_blocks(pricer, calls, chosen, setting)
        own = [
            BlockCosts(
                seconds=_seconds(on_stage, setting, c, decisions[c], is_split=how != "whole"),
                bytes=nbytes,
            )
            for c, nbytes in zip(calls, sizes, strict=True)
        ]
        own[0] = _with_action(own[0], action_s(pricer, setting), setting)
        blocks = tuple(
            _named(names, _title(pricer, c), block) for c, block in zip(calls, own, strict=True)
        )
        part = part_bytes(pricer, setting, stage, spans, chosen)
        is_sliced = chosen[0].is_sequence_parallel
        stages.append(
            StageCosts(
                blocks=blocks,
                send_s=sent_s(pricer, setting, calls[-1] + 1, stage, is_sliced)
                if stage < len(spans) - 1
                else 0.0,
                side_bytes=part.side,
                input_bytes=batch_bytes(pricer.trace, setting),
                entering_bytes=part.entering,
                leaving_bytes=part.leaving,
                handed_bytes=part.handed,
                returning_bytes=part.returning,
                backward=how,
            )
        )
    optimizer = pricer.workload.optimizer
    return PlanCosts(
        blocks={name: block for block, name in names.items()},
        stages=tuple(stages),
        overlaps=overlaps(setting, pricer.cluster),
        state_bytes_per_byte=optimizer.state_bytes_per_byte,
        is_foreach=optimizer.is_foreach,
        reserve_bytes=pricer.cluster.reserved_bytes,
    )


def _with_action(block: BlockCosts, action_s: float, setting: Setting) -> BlockCosts:
    """Return the first block of a stage with what the host takes for its actions."""
    seconds = block.seconds
    if action_s == 0:
        return block
    later_s = action_s if setting.schedule == "zero_bubble" else 0.0
    return replace(
        block,
        seconds=replace(
            seconds,
            forward=seconds.forward + action_s,
            backward=seconds.backward + action_s + later_s,
            weight_backward=seconds.weight_backward + later_s,
        ),
    )


def _title(pricer: Pricer, call: int) -> str:
    return pricer.trace.blocks[pricer.trace.calls[call].block].name


def _seconds(
    pricer: Pricer, setting: Setting, call: int, decision: Decision, *, is_split: bool
) -> BlockSeconds:
    """Return seconds of a block, with what its collectives and kernels cost each other.

    `is_split`: its stage's backward can be split.
    """
    block = pricer.trace.calls[call].block
    base = pricer.base(block, decision, setting.tp)
    group = pricer.groups.own(call, decision, setting)
    timer = pricer.layouts.timer(setting.tp)
    gather_s, reduce_s = zero_seconds(group, setting, pricer.workload, timer)
    host_forward_s, host_backward_s = host_seconds(
        base, group, setting, pricer.workload, pricer.cluster, sum(pricer.split_s(base, setting))
    )
    once = pricer.price(call, decision, setting).once_by_category
    slow_forward_s = slow_backward_s = 0.0
    if overlaps(setting, pricer.cluster):
        gathered_s = gather_s if setting.zero_stage == 3 else 0.0
        is_gathered_again = regathers(setting, is_glue=pricer.trace.blocks[block].is_glue)
        regathered_s = gather_s if is_gathered_again else 0.0
        reduced_s = reduce_s if setting.zero_stage >= 2 else 0.0
        slowed = interference(data_parallel_link(setting, pricer.cluster))
        slow_forward_s = slowdown_s(gathered_s, base.forward_s, slowed)
        slow_backward_s = slowdown_s(regathered_s + reduced_s, base.backward_s, slowed)
    return BlockSeconds(
        forward=base.compute_forward_s + host_forward_s + slow_forward_s + base.away_s,
        backward=base.compute_backward_s + host_backward_s + slow_backward_s + base.away_s,
        weight_backward=pricer.deferred_s(base, setting) if is_split else 0.0,
        recompute=base.redo_s - base.redo_comm_s,
        forward_tensor_parallel=base.comm_forward_s,
        backward_tensor_parallel=base.comm_backward_s,
        recompute_tensor_parallel=base.redo_comm_s,
        gather=gather_s + slow_forward_s,
        reduce=reduce_s + max(0.0, slow_backward_s - slow_forward_s),
        optimizer=once["optimizer"],
        ties=once["pipeline"],
    )


def _named(names: dict[BlockCosts, str], base: str, block: BlockCosts) -> str:
    """Return the name of a block, giving a new one its class's name and a number."""
    if block not in names:
        taken = set(names.values())
        number, name = 0, base
        while name in taken:
            number += 1
            name = f"{base}.{number}"
        names[block] = name
    return names[block]
