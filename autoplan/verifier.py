"""The numbered rules that every plan obeys, checked without the search that made it.

V1  degrees multiply to the devices of the cluster
V2  dp * num_microbatches * microbatch_size is the global batch
V3  stages hold every call of the chain once, in order
V4  every block names a layout and a recompute entry of its own class that exist
V5  the schedule fits stages and micro-batches, and torch can run it with the data parallelism
V6  axes exist and the tensor-parallel degree divides them
V7  the plan was made for this program
V8  every parameter lives in a stage, and in several only if it is shared, on different ranks; all
    calls that have it store it alike
V9  the ZeRO stage is 0 to 3, and 0 without data parallelism
V10 keep marks are on ops that may carry one
V11 categories add up to the peak, and the peak is within the capacity
V12 the peak is not below an independent sum of static and kept bytes
V13 every stage of a pipeline has parameters, without which no optimizer can be made on its ranks
V14 what is written is seen: a state that changes is on one stage, no copy of an input is written to
    whose other views are read
V15 activations enter a block as the one before hands them on, and cross stages all in one way
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.errors import PlanError
from autoplan.graph import BlockTrace, Placement, Trace
from autoplan.optimizers import Optimizer
from autoplan.plan import BlockPlan, Plan, Recompute
from autoplan.schedules import MULTI_STAGE, schedule_actions, unrunnable_split
from autoplan.shared_writes import lost_under
from autoplan.stage_ends import holders
from autoplan.tensor_layout import Border, boundary_of
from autoplan.units import format_bytes

__all__ = ["Violation", "check_plan", "independent_bytes", "verify_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a plan breaks, and how."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def verify_plan(plan: Plan, trace: Trace, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules that `plan` breaks for this trace and cluster; empty when it is sound."""
    checks = (
        _sizes(plan, cluster),
        _coverage(plan, trace),
        _names(plan, trace),
        _schedule(plan),
        _axes(plan, trace),
        _handed_over(plan, trace),
        _parameters(plan, trace),
        _stored_alike(plan, trace),
        _marks(plan, trace),
        _writes(plan, trace),
        _memory(plan, cluster),
    )
    found = [v for check in checks for v in check]
    if not found:
        found = list(_independent(plan, trace))
    return tuple(found)


def check_plan(plan: Plan, trace: Trace, cluster: Cluster) -> None:
    """Raise a `PlanError` that lists every broken rule, if there is one."""
    found = verify_plan(plan, trace, cluster)
    if found:
        raise PlanError("the plan breaks its rules:\n" + "\n".join(map(str, found)))


def _sizes(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    mesh = plan.mesh
    if mesh.world_size != cluster.world_size:
        yield Violation(
            rule="V1",
            message=f"{mesh} is {mesh.world_size} devices, {cluster} has {cluster.world_size}",
        )
    product = mesh.dp * plan.num_microbatches * plan.microbatch_size
    if product != plan.global_batch_size:
        yield Violation(
            rule="V2",
            message=f"dp {mesh.dp} * num_microbatches {plan.num_microbatches} * microbatch_size "
            f"{plan.microbatch_size} is {product}, the global batch is {plan.global_batch_size}",
        )
    if mesh.dp_replicate > 1 and (plan.zero_stage == 0 or mesh.dp_replicate == mesh.dp):
        yield Violation(
            rule="V9",
            message=f"{mesh.dp_replicate} replicas of dp={mesh.dp} with ZeRO stage "
            f"{plan.zero_stage}: nothing is sharded",
        )
    is_offloaded = plan.offload != "none"
    if not 0 <= plan.zero_stage <= 3 or (mesh.dp == 1 and plan.zero_stage and not is_offloaded):
        yield Violation(rule="V9", message=f"ZeRO stage {plan.zero_stage} with dp={mesh.dp}")
    if is_offloaded and plan.zero_stage != 3:
        yield Violation(
            rule="V9", message=f"ZeRO stage {plan.zero_stage} with offload: it needs stage 3"
        )


def _coverage(plan: Plan, trace: Trace) -> Iterator[Violation]:
    if plan.fingerprint != trace.fingerprint:
        yield Violation(
            rule="V7",
            message=f"planned for program {plan.fingerprint}, this one is {trace.fingerprint}: "
            "plan again for this model, batch shape and torch version",
        )
    calls = [block.call for stage in plan.stages for block in stage.blocks]
    if calls != list(range(len(trace.calls))):
        yield Violation(
            rule="V3",
            message=f"stages hold calls {calls}, the chain is 0 to {len(trace.calls) - 1}",
        )
    order = [s.index for s in plan.stages]
    if order != list(range(len(order))) or not order or len(order) % plan.mesh.pp:
        yield Violation(
            rule="V3", message=f"{len(plan.stages)} stages for pp={plan.mesh.pp}, or out of order"
        )
    if any(not stage.blocks for stage in plan.stages):
        yield Violation(rule="V3", message="a stage is empty")
    holds = holders(trace)
    for stage in plan.stages if plan.mesh.pp > 1 else ():
        own = [b.call for b in stage.blocks if 0 <= b.call < len(holds)]
        if own and not any(holds[call] for call in own):
            yield Violation(rule="V13", message=f"stage {stage.index} has no parameters")


def _blocks(plan: Plan, trace: Trace) -> Iterator[tuple[BlockPlan, BlockTrace]]:
    for stage in plan.stages:
        for block in stage.blocks:
            if 0 <= block.call < len(trace.calls):
                yield block, trace.blocks[trace.calls[block.call].block]


def _names(plan: Plan, trace: Trace) -> Iterator[Violation]:
    for block, traced in _blocks(plan, trace):
        if block.block != traced.name:
            yield Violation(
                rule="V4", message=f"call {block.call} is a {traced.name}, not a {block.block}"
            )
        if block.recompute not in plan.recompute:
            yield Violation(
                rule="V4", message=f"call {block.call}: no recompute entry {block.recompute!r}"
            )
        layout = plan.placements.get(block.placements)
        if layout is None or layout.block != traced.name or layout.degree != plan.mesh.tp:
            yield Violation(
                rule="V4",
                message=f"call {block.call}: layout {block.placements!r} is missing, of another "
                "class, or of another degree",
            )


def _schedule(plan: Plan) -> Iterator[Violation]:
    pp, m = plan.mesh.pp, plan.num_microbatches
    if (pp == 1) != (plan.schedule == "none"):
        yield Violation(rule="V5", message=f"schedule {plan.schedule} with {pp} stages")
    if plan.schedule == "1f1b" and m < pp:
        yield Violation(rule="V5", message=f"1F1B has {m} micro-batches for {pp} stages")
    entries = (plan.recompute.get(b.recompute) for s in plan.stages for b in s.blocks)
    unrunnable = unrunnable_split(
        plan.schedule,
        plan.zero_stage,
        is_mixed=plan.mixed_precision != "none",
        recomputes=any(entry is not None and entry.mode != "none" for entry in entries),
    )
    if unrunnable is not None:
        yield Violation(rule="V5", message=unrunnable)
    try:
        schedule_actions(plan.schedule, pp, m, plan.num_chunks)
    except ValueError as error:
        yield Violation(rule="V5", message=str(error))


def _handed_over(plan: Plan, trace: Trace) -> Iterator[Violation]:
    made: dict[str, tuple[int, Border]] = {}
    tp = plan.mesh.tp
    sent: Border = "tokens" if plan.slices > 1 else "whole"
    for stage in plan.stages:
        for block in stage.blocks:
            layout = plan.placements.get(block.placements)
            if layout is None or not 0 <= block.call < len(trace.calls):
                continue
            call = trace.calls[block.call]
            entering, leaving = layout.both_borders
            for value, name in zip(trace.blocks[call.block].inputs, call.args, strict=True):
                if name not in made:
                    continue
                maker, handed = made[name]
                ways = (handed, entering) if maker == stage.index else (handed, sent, entering)
                if len({boundary_of(value, tp, way) for way in ways}) > 1:
                    yield Violation(
                        rule="V15",
                        message=f"{block.fqn or block.block} takes over {name} as {entering}, and "
                        f"it comes as {ways[-2]}",
                    )
            made |= dict.fromkeys(call.outs, (stage.index, leaving))


def _axes(plan: Plan, trace: Trace) -> Iterator[Violation]:
    blocks = {block.name: block for block in trace.blocks}
    for name, layout in plan.placements.items():
        block = blocks.get(layout.block)
        if block is None:
            yield Violation(rule="V4", message=f"layout {name} is for no class of this model")
            continue
        ops = {op.name: op for op in block.ops}
        for op_name, axis in layout.axes.items():
            options = {o.axis: o for o in ops[op_name].options} if op_name in ops else {}
            if axis not in options:
                yield Violation(rule="V6", message=f"{name}: {op_name} has no axis {axis!r}")
            elif axis != "partial" and options[axis].size % layout.degree:
                yield Violation(
                    rule="V6",
                    message=f"{name}: {op_name} has {options[axis].size} along {axis}, which "
                    f"tp={layout.degree} does not divide",
                )


def _parameters(plan: Plan, trace: Trace) -> Iterator[Violation]:
    canonical = trace.first_names()
    shared = {group[0] for group in trace.shared}
    stages: dict[str, set[int]] = {}
    for stage in plan.stages:
        for block in stage.blocks:
            if 0 <= block.call < len(trace.calls):
                for fqn in trace.calls[block.call].states:
                    stages.setdefault(canonical.get(fqn, fqn), set()).add(stage.index)
    needed = {canonical.get(f, f) for call in trace.calls for f in call.states}
    for fqn in sorted(needed - set(stages)):
        yield Violation(rule="V8", message=f"{fqn} is in no stage")
    names = {tuple(group) for group in plan.shared}
    for fqn, where in stages.items():
        if len(where) > 1 and fqn in shared and not any(fqn in group for group in names):
            yield Violation(rule="V8", message=f"{fqn} is in stages {sorted(where)}, not shared")
        if len({stage % plan.mesh.pp for stage in where}) < len(where):
            yield Violation(
                rule="V8", message=f"{fqn} is in stages {sorted(where)}, two of them on one rank"
            )


def _stored_alike(plan: Plan, trace: Trace) -> Iterator[Violation]:
    canonical = trace.first_names()
    stored: dict[str, dict[str, str]] = {}
    for block, traced in _blocks(plan, trace):
        layout = plan.placements.get(block.placements)
        if layout is None:
            continue
        for state, fqn in zip(traced.states, trace.calls[block.call].states, strict=True):
            if state.fqn in layout.parameters:
                texts = stored.setdefault(canonical.get(fqn, fqn), {})
                texts.setdefault(layout.parameters[state.fqn], block.placements)
    for fqn, texts in stored.items():
        if len(texts) > 1:
            ways = " and ".join(f"{text} by {name}" for text, name in texts.items())
            yield Violation(rule="V8", message=f"{fqn} is one parameter, stored as {ways}")


def _marks(plan: Plan, trace: Trace) -> Iterator[Violation]:
    for block, traced in _blocks(plan, trace):
        entry = plan.recompute.get(block.recompute)
        legal = {op.name for op in traced.ops if op.may_mark}
        for name in entry.keep if entry else ():
            if name not in legal:
                yield Violation(rule="V10", message=f"call {block.call}: {name} may not be kept")


def _writes(plan: Plan, trace: Trace) -> Iterator[Violation]:
    stage_of = {block.call: stage.index for stage in plan.stages for block in stage.blocks}
    for state in trace.changed:
        where = sorted({stage_of[call] for call in state.calls if call in stage_of})
        if len(where) > 1:
            yield Violation(
                rule="V14", message=f"the forward changes {state.fqn}, which stages {where} use"
            )
    modes = {
        block.call: plan.recompute[block.recompute].mode
        for stage in plan.stages
        for block in stage.blocks
        if block.recompute in plan.recompute
    }
    is_mixed = plan.mixed_precision != "none"
    for lost, reason in lost_under(
        trace.lost_writes, modes, pp=plan.mesh.pp, zero_stage=plan.zero_stage, is_mixed=is_mixed
    ):
        yield Violation(
            rule="V14",
            message=f"with {reason} call {lost.writer} writes to a copy, and {lost.value} does "
            "not show it",
        )


def _memory(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    predicted = plan.predicted
    lengths = {len(predicted.peak_memory_bytes), len(predicted.memory_by_category)}
    if lengths != {plan.mesh.pp}:
        yield Violation(
            rule="V11",
            message=f"memory is predicted for {sorted(lengths)} stages, the plan has "
            f"{plan.mesh.pp}",
        )
        return
    for stage, (peak, parts) in enumerate(
        zip(predicted.peak_memory_bytes, predicted.memory_by_category, strict=True)
    ):
        if sum(parts.values()) != peak:
            yield Violation(
                rule="V11",
                message=f"stage {stage}: categories add up to {sum(parts.values())}, not {peak}",
            )
        total = cluster.on_stage(plan.mesh, stage).total_bytes
        if plan.search.status != "priced" and peak > total:
            yield Violation(
                rule="V11",
                message=f"stage {stage} needs {format_bytes(peak)}, {cluster} leaves "
                f"{format_bytes(total)}",
            )


def _independent(plan: Plan, trace: Trace) -> Iterator[Violation]:
    for stage, need in enumerate(independent_bytes(plan, trace)):
        peak = plan.predicted.peak_memory_bytes[stage]
        if need > peak:
            yield Violation(
                rule="V12",
                message=f"stage {stage} is predicted to peak at {format_bytes(peak)}, but its "
                f"parameters, optimizer state and kept activations alone are {format_bytes(need)}",
            )


def independent_bytes(plan: Plan, trace: Trace) -> tuple[int, ...]:
    """Return per rank of the pipeline the bytes that any execution holds at its fullest.

    Parameters and optimizer state under ZeRO and tensor parallelism, plus, for every live
    micro-batch, what its blocks keep: without a region every tensor that autograd saves, in one the
    marked results. Shares round down: this is a lower bound, made straight from the trace.
    """
    ratio = 2 if plan.mixed_precision != "none" else 1
    states = Optimizer.named(plan.optimizer, is_foreach=False).state_bytes_per_byte
    shards = plan.mesh.dp // plan.mesh.dp_replicate if plan.zero_stage >= 1 else 1
    canonical = trace.first_names()
    needs = [0] * plan.mesh.pp
    for stage in plan.stages:
        live = _live(plan, stage.index)
        seen: set[str] = set()
        total = 0
        for block in stage.blocks:
            call = trace.calls[block.call]
            traced = trace.blocks[call.block]
            layout = plan.placements[block.placements]
            for state, fqn in zip(traced.states, call.states, strict=True):
                name = canonical.get(fqn, fqn)
                if name in seen or not state.is_parameter:
                    continue
                seen.add(name)
                placed = Placement.parse(layout.parameters.get(state.fqn, "R"))
                part = plan.mesh.tp if placed.kind == "shard" else 1
                size = state.nbytes * ratio * (1 + states * state.is_trained)
                total += 0 if plan.offload != "none" else int(size) // (part * shards)
            entry = plan.recompute[block.recompute]
            total += live * _kept_bytes(traced, entry) // plan.mesh.tp
        needs[stage.index % plan.mesh.pp] += total
    return tuple(needs)


def _live(plan: Plan, stage: int) -> int:
    """Return micro-batches that a stage has in flight when its rank holds most, or fewer."""
    pp, m = plan.mesh.pp, plan.num_microbatches
    if plan.schedule in MULTI_STAGE:
        # Stages of a rank hold most at different times, and backwards of inputs free some.
        return 1 if plan.num_chunks > 1 else min(m, pp - stage)
    if plan.schedule == "1f1b":
        return min(m, pp - stage)
    return m if plan.schedule == "gpipe" else 1


def _kept_bytes(block: BlockTrace, entry: Recompute) -> int:
    """Return what a block keeps of what it makes itself, before tensor parallelism divides it."""
    if entry.mode != "none":
        return sum(op.mark_bytes for op in block.ops if op.name in set(entry.keep))
    outside = {v.name for v in block.inputs}
    own: dict[str, int] = {}
    internal = 0
    for op in block.ops:
        for tensor in op.saved:
            if not tensor.value:
                internal += tensor.nbytes
            elif tensor.value not in outside:
                own[tensor.value] = tensor.nbytes
    return internal + sum(own.values())
