"""Bytes of a pipeline stage as the memory model reads them, gathered from its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.costs import Pricer
from autoplan.deferral import stage_backward
from autoplan.expert_parallel import expert_states
from autoplan.flat_partitions import PipeBuffers, pipe_buffers
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.losses import logits_bytes
from autoplan.memory import StageMemory, stage_memory
from autoplan.settings import Setting
from autoplan.stage_borders import StageBorders, borders_of, carried_bytes, kept_by
from autoplan.stage_costs import StageBlock
from autoplan.stage_walk import PartBytes
from autoplan.times import overlaps_communication

__all__ = [
    "batch_bytes",
    "output_bytes",
    "part_bytes",
    "pipe_engine_buffers",
    "rank_memory",
    "side_bytes",
    "stage_block",
    "stage_blocks",
    "standing_bytes",
]

_COMPUTED_BYTES = 2  # an element of the 16-bit dtypes that such engines compute in


def stage_block(
    pricer: Pricer,
    call: int,
    decision: Decision,
    setting: Setting,
    held: set[str],
    values: set[str],
    borders: StageBorders,
    carried: int,
) -> StageBlock:
    """Return a call as the memory model reads it.

    Args:
        call, decision, setting, held: as in `ParameterGroups.of`.
        values: activations that earlier calls of the stage keep, to count each once; those that
            this call keeps are added.
        borders: of the stage.
        carried: bytes of gradients beside its backward.
    """
    trace_call = pricer.trace.calls[call]
    block = trace_call.block
    work = pricer.base(block, decision, setting.tp)
    kept = kept_by(trace_call, work, [v.name for v in pricer.trace.blocks[block].inputs])
    own = {value: nbytes for value, nbytes in kept.items() if value not in values}
    # Megatron-LM's receive buffers are not counted apart: what enters is its first reader's.
    received = {} if pricer.workload.engine.has_gradient_buffer else borders.entering
    input_bytes = sum(
        work.local.inputs.get(value.name, 0)
        for value, name in zip(pricer.trace.blocks[block].inputs, trace_call.args, strict=True)
        if name not in values and name not in received
    )
    values.update(kept)
    return StageBlock(
        memory=work.memory,
        accumulating=work.accumulating,
        group=pricer.groups.of(call, decision, setting, held),
        is_glue=pricer.trace.blocks[block].is_glue,
        input_bytes=input_bytes,
        shared_bytes=sum(kept.values()) - sum(own.values()),
        deferred_bytes=work.deferred.nbytes,
        released_bytes=work.deferred.released_bytes,
        border_bytes=borders.kept_bytes(own),
        carried_bytes=carried,
    )


def stage_blocks(
    pricer: Pricer, calls: Sequence[int], decisions: Sequence[Decision], setting: Setting
) -> tuple[StageBlock, ...]:
    """Return the calls of a stage as the memory model reads them; `decisions` one per call.

    What several calls hold counts once: with the first, but a parameter's gradient is made by
    the backward of the last call that reads it, which runs first.
    """
    held: set[str] = set()
    values: set[str] = set()
    borders = _borders(pricer, setting, calls, decisions)
    works = [
        pricer.base(pricer.trace.calls[call].block, decision, setting.tp)
        for call, decision in zip(calls, decisions, strict=True)
    ]
    carried = carried_bytes(borders, works)
    blocks = [
        stage_block(pricer, call, decision, setting, held, values, borders, nbytes)
        for call, decision, nbytes in zip(calls, decisions, carried, strict=True)
    ]
    canonical = pricer.trace.first_names()
    readers: dict[str, list[tuple[int, int]]] = {}
    for place, (call, decision) in enumerate(zip(calls, decisions, strict=True)):
        trace_call = pricer.trace.calls[call]
        local = pricer.base(trace_call.block, decision, setting.tp).local
        states = pricer.trace.blocks[trace_call.block].states
        for state, fqn in zip(states, trace_call.states, strict=True):
            if state.is_parameter and state.is_trained:
                own = (place, local.state_bytes[state.name])
                readers.setdefault(canonical.get(fqn, fqn), []).append(own)
    for found in readers.values():
        (first, _), (last, nbytes) = found[0], found[-1]
        if first != last:
            late, early = blocks[first].group, blocks[last].group
            late = replace(late, late_grads=late.late_grads + nbytes)
            early = replace(early, early_grads=early.early_grads + nbytes)
            blocks[first] = replace(blocks[first], group=late)
            blocks[last] = replace(blocks[last], group=early)
    return tuple(blocks)


def _borders(
    pricer: Pricer, setting: Setting, calls: Sequence[int], decisions: Sequence[Decision]
) -> StageBorders:
    """Return what crosses the borders of a stage."""
    slices = setting.tp if decisions[0].is_sequence_parallel else 1
    return borders_of(pricer.trace, range(calls[0], calls[-1] + 1), slices=slices)


def side_bytes(pricer: Pricer, calls: Sequence[int], decisions: Sequence[Decision], tp: int) -> int:
    """Return bytes of side values that one micro-batch holds in a stage, each once."""
    sizes: dict[str, int] = {}
    side = dict(pricer.trace.side)
    for call, decision in zip(calls, decisions, strict=True):
        trace_call = pricer.trace.calls[call]
        kept = pricer.base(trace_call.block, decision, tp).memory.side
        inputs = pricer.trace.blocks[trace_call.block].inputs
        for value, argument in zip(inputs, trace_call.args, strict=True):
            if value.name in kept and argument in side:
                sizes[argument] = side[argument]
    return sum(sizes.values())


def rank_memory(
    pricer: Pricer,
    setting: Setting,
    rank: int,
    spans: Sequence[range],
    decisions: Sequence[Decision],
) -> StageMemory:
    """Return the memory of a rank of the pipeline, with all its stages."""
    blocks: list[StageBlock] = []
    parts = []
    for stage in range(rank, len(spans), setting.pp):
        calls = spans[stage]
        own = [decisions[c] for c in calls]
        blocks += stage_blocks(pricer, calls, own, setting)
        parts.append(part_bytes(pricer, setting, stage, spans, own))
    every = [c for s in range(rank, len(spans), setting.pp) for c in spans[s]]
    pipe = pipe_engine_buffers(pricer, setting, parts)
    in_flight = min(setting.pp - rank, setting.num_microbatches)
    return stage_memory(
        blocks,
        setting,
        pricer.workload.optimizer,
        stage=rank,
        is_mixed=pricer.workload.mixed_precision != "none",
        is_gloo=not overlaps_communication(pricer.cluster),
        input_bytes=batch_bytes(pricer.trace, setting),
        standing_bytes=standing_bytes(pricer, every, decisions, setting)
        + output_bytes(pricer, every, decisions, setting.tp)
        + pipe.standing
        + in_flight * (pipe.received + pipe.sent),
        parts=parts,
        reserve=pricer.cluster.reserved_bytes,
        engine=pricer.workload.engine,
    )


def part_bytes(
    pricer: Pricer,
    setting: Setting,
    stage: int,
    spans: Sequence[range],
    decisions: Sequence[Decision],
) -> PartBytes:
    """Return what a stage holds beside its blocks.

    Args:
        setting: degrees.
        stage: its index.
        spans: the calls of every stage.
        decisions: one per call of this stage.
    """
    calls = spans[stage]
    crossing = pricer.trace.crossing_bytes
    entering = crossing[calls[0] - 1] if stage > 0 else 0
    leaving = crossing[calls[-1]] if stage < len(spans) - 1 else 0
    if decisions[0].is_sequence_parallel:
        entering, leaving = -(-entering // setting.tp), -(-leaving // setting.tp)
    is_split = setting.schedule == "zero_bubble"
    borders = _borders(pricer, setting, calls, decisions)
    # What leaves a stage whose backward is split is no view: what is handed on is copied.
    return PartBytes(
        num_blocks=len(calls),
        backward=stage_backward(pricer.trace, calls) if is_split else "split",
        side=side_bytes(pricer, calls, decisions, setting.tp),
        entering=entering,
        leaving=leaving,
        handed=0 if is_split else min(borders.handed_bytes, entering, leaving),
        returning=min(borders.returning, entering),
    )


def pipe_engine_buffers(
    pricer: Pricer, setting: Setting, parts: Sequence[PartBytes]
) -> PipeBuffers:
    """Return what a rank of DeepSpeed's pipeline engine holds at its borders, else nothing."""
    if not pricer.workload.engine.output_buffers or setting.pp == 1:
        return PipeBuffers()
    entering, leaving = (sum(getattr(p, side) for p in parts) for side in ("entering", "leaving"))
    return pipe_buffers(entering, leaving, setting.tp)


def standing_bytes(
    pricer: Pricer, calls: Sequence[int], decisions: Sequence[Decision], setting: Setting
) -> int:
    """Return bytes that an engine holds beside a step's tensors, for as long as it trains.

    Tensors that stand for weight gradients, one for each shape, what DeepSpeed reduces gradients
    through, and gradients that are reduced only once a step.
    """
    engine = pricer.workload.engine
    nbytes = 0
    if engine.keeps_stand_ins:
        nbytes += _stand_in_bytes(pricer, calls, decisions, setting.tp)
    if setting.zero_stage > 0:
        nbytes += engine.bucket_elements * _COMPUTED_BYTES
    if setting.zero_stage == 3 and engine.accumulates_whole:
        held: set[str] = set()
        groups = [pricer.groups.of(c, decisions[c], setting, held) for c in calls]
        nbytes += sum(group.gathered for group in groups)
    return nbytes


def output_bytes(
    pricer: Pricer, calls: Sequence[int], decisions: Sequence[Decision], tp: int
) -> int:
    """Return bytes of the logits that lie in the buffers of a pipeline engine."""
    count, last = pricer.workload.engine.output_buffers, calls[-1]
    if not count:
        return 0
    return count * logits_bytes(
        pricer.base(pricer.trace.calls[last].block, decisions[last], tp).local
    )


def _stand_in_bytes(
    pricer: Pricer, calls: Sequence[int], decisions: Sequence[Decision], tp: int
) -> int:
    sizes: dict[tuple[object, ...], int] = {}
    for block, decision in {
        (pricer.trace.calls[c].block, decisions[c].key): (pricer.trace.calls[c].block, decisions[c])
        for c in calls
    }.values():
        local = pricer.base(block, decision, tp).local
        if local.block.is_glue:
            continue
        products = {n for op in local.ops if op.op and op.op.kind == "gemm" for n in op.inputs}
        experts = expert_states(local.block)
        for state in local.block.states:
            if state.name in products and state.is_trained and len(state.shape) > 1:
                nbytes, shape = local.state_bytes[state.name], state.shape
                if state.name in experts:
                    nbytes, shape = nbytes // shape[0], shape[1:]  # one for a matrix of any expert
                sizes[(shape, local.state_placements[state.name])] = nbytes
    return sum(sizes.values())


def batch_bytes(trace: Trace, setting: Setting) -> int:
    """Return bytes of this rank's share of the batch for one step.

    Micro-batches are slices of it, but copies where the batch is not dimension 0.
    """
    dims = trace.batch_dims or (0,) * len(trace.inputs)
    pairs = zip(trace.inputs, dims, strict=True)
    nbytes = sum(value.nbytes * (2 if dim else 1) for value, dim in pairs)
    return nbytes * setting.num_microbatches
