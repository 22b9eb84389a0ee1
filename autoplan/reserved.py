"""Bytes that the caching allocator reserves on each stage of a decided plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.block_work import memory_views
from autoplan.costs import Pricer
from autoplan.expert_parallel import expert_states
from autoplan.frontiers import Decision
from autoplan.liveness import block_events
from autoplan.local_blocks import LocalBlock
from autoplan.losses import logits_bytes, loss_of
from autoplan.replay import Reserved, replayed
from autoplan.replay_groups import OutputCast, Parameter, ReplayedBlock
from autoplan.settings import Setting
from autoplan.stage_bytes import batch_bytes, part_bytes, pipe_engine_buffers, standing_bytes

__all__ = ["reserved_memory"]


def reserved_memory(
    pricer: Pricer,
    setting: Setting,
    ends: Sequence[int],
    decisions: Sequence[Decision],
    *,
    is_expandable: bool,
) -> tuple[Reserved, ...]:
    """Return per rank of the pipeline what its tensors take and what is reserved for them.

    Args:
        pricer: of the micro-batch size.
        setting: degrees and sizes.
        ends: per stage the index after its last call.
        decisions: one per call.
        is_expandable: segments of the allocator grow.
    """
    spans = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    found = []
    for rank in range(setting.pp):
        stages = range(rank, len(spans), setting.pp)
        own = [spans[stage] for stage in stages]
        calls = [call for span in own for call in span]
        parts = [
            part_bytes(pricer, setting, stage, spans, [decisions[c] for c in spans[stage]])
            for stage in stages
        ]
        run = replayed(
            _blocks(pricer, setting, calls, decisions),
            setting,
            pricer.workload,
            stage=rank,
            part_sizes=[len(span) for span in own],
            is_expandable=is_expandable,
            capacity_bytes=pricer.cluster.capacity_bytes,
            pipe=pipe_engine_buffers(pricer, setting, parts),
            fixed_bytes=(
                batch_bytes(pricer.trace, setting),
                standing_bytes(pricer, calls, decisions, setting),
            ),
        )
        found.append(run)
    return tuple(found)


def _blocks(
    pricer: Pricer, setting: Setting, calls: Sequence[int], decisions: Sequence[Decision]
) -> tuple[ReplayedBlock, ...]:
    held: set[str] = set()
    made: dict[tuple[int, object], ReplayedBlock] = {}
    blocks = []
    for call in calls:
        key = (pricer.trace.calls[call].block, decisions[call].key)
        if key not in made:
            made[key] = _shared_part(pricer, setting, call, decisions[call])
        blocks.append(_own_part(pricer, setting, call, decisions[call], made[key], held))
    return tuple(blocks)


def _shared_part(pricer: Pricer, setting: Setting, call: int, decision: Decision) -> ReplayedBlock:
    """Return what is the same for all calls of a class under a decision."""
    base = pricer.base(pricer.trace.calls[call].block, decision, setting.tp)
    local, later, recompute = memory_views(base.local, decision, pricer.workload)
    loss, num_kept = loss_of(local), pricer.workload.engine.output_buffers
    return ReplayedBlock(
        events=block_events(local, recompute),
        accumulating=block_events(later, recompute, accumulating=True),
        is_glue=local.block.is_glue,
        inputs={},
        outputs={},
        held=frozenset((*base.memory.held_inputs, *base.memory.side)),
        parameters=(),
        states={},
        cast=None
        if loss is None or not num_kept
        else OutputCast(
            before=f"{loss.name}:internal",
            source=_storage(local, loss.inputs[0]),
            nbytes=logits_bytes(base.local),
            num_kept=num_kept,
        ),
    )


def _storage(local: LocalBlock, name: str) -> str:
    return next((op.storage for op in local.ops if op.name == name), name)


def _own_part(
    pricer: Pricer,
    setting: Setting,
    call: int,
    decision: Decision,
    shared: ReplayedBlock,
    held: set[str],
) -> ReplayedBlock:
    trace, trace_call = pricer.trace, pricer.trace.calls[call]
    local = pricer.base(trace_call.block, decision, setting.tp).local
    sizes = {**local.inputs, **local.side_inputs}
    pairs = zip(local.block.inputs, trace_call.args, strict=True)
    outs = zip(local.outputs, trace_call.outs, strict=True)
    canonical = trace.first_names()
    names = {
        state.name: canonical.get(fqn, fqn)
        for state, fqn in zip(local.block.states, trace_call.states, strict=True)
    }
    ratio = pricer.workload.parameter_bytes_per_traced_byte
    degrees = pricer.workload.experts
    experts = expert_states(local.block) if degrees.degree > 1 else frozenset()
    parameters = []
    for state in local.block.states:
        if names[state.name] in held:
            continue
        held.add(names[state.name])
        nbytes = local.state_bytes[state.name]
        parameters.append(
            Parameter(
                name=names[state.name],
                stored=nbytes * (ratio if state.is_parameter else 1),
                gathered=nbytes,
                is_trained=state.is_parameter and state.is_trained,
                copies=degrees.copies(setting.dp, setting.tp) if state.name in experts else 0,
            )
        )
    return replace(
        shared,
        inputs={value.name: (arg, sizes[value.name]) for value, arg in pairs},
        outputs={
            name: (out, local.value_bytes.get(shared.events.outputs[name], 0)) for name, out in outs
        },
        parameters=tuple(parameters),
        states=names,
    )
