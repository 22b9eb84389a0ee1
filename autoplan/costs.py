"""Price a way to run a block, a stage or a whole plan: seconds by category and bytes by category.

One `Pricer` serves one trace (one micro-batch size) on one cluster. It caches what depends on the
block class, the tensor-parallel degree and the decision only, and adds what the setting costs:
ZeRO gathers and reductions, the optimizer step, pipeline transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoplan.cluster import Cluster
from autoplan.frontiers import Decision, Frontiers
from autoplan.fusion import fused_kernels, joined
from autoplan.graph import Trace
from autoplan.inner_recompute import folded
from autoplan.liveness import BlockMemory, block_memory, needed_marks, redone_ops
from autoplan.local import LocalBlock, LocalOp, localize
from autoplan.losses import logits_bytes, with_loss
from autoplan.memory import (
    GroupBytes,
    PartBytes,
    StageBlock,
    StageMemory,
    stage_memory,
    static_bytes,
    uses_fsdp,
)
from autoplan.offload import away_s, host_optimizer_s
from autoplan.plan import Recompute
from autoplan.search.problem import BlockOption
from autoplan.settings import Setting, Workload, shared_states
from autoplan.step_costs import (
    copy_bytes,
    data_parallel_link,
    data_parallel_times,
    exposed_s,
    interference,
    is_wrapped,
    optimizer_bytes,
    pipeline_step_s,
    regathers,
    transfer_s,
)
from autoplan.tensor_layout import boundary_of
from autoplan.times import OpTime, Tally, Timer, overlaps_communication

__all__ = ["BlockPrice", "PlanPrice", "Pricer"]

TICK_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class _BlockBase:
    """What a decision costs by itself at a tensor-parallel degree.

    `away_s`: of copying what is saved to the host in the forward, or back in the backward.

    Its memory is walked when it is first asked for: a bound of the time does not need it.
    """

    local: LocalBlock
    views: tuple[LocalBlock, LocalBlock]
    recompute: Recompute
    compute_forward_s: float
    compute_backward_s: float
    comm_forward_s: float
    comm_backward_s: float
    summed_s: float
    redo_s: float
    redo_comm_s: float
    weight_backward_s: float
    deferred_bytes: int
    away_s: float
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    @property
    def forward_s(self) -> float:
        """Return seconds of one micro-batch's forward, without data-parallel collectives."""
        return self.compute_forward_s + self.comm_forward_s + self.away_s

    @property
    def backward_s(self) -> float:
        """Return seconds of its backward, what runs again included, without them likewise."""
        return self.compute_backward_s + self.comm_backward_s + self.redo_s + self.away_s

    @cached_property
    def memory(self) -> BlockMemory:
        """Return the bytes of a step's first micro-batch."""
        return block_memory(self.views[0], self.recompute)

    @cached_property
    def accumulating(self) -> BlockMemory:
        """Return the bytes of a later micro-batch."""
        return block_memory(self.views[1], self.recompute, accumulating=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """Seconds of one micro-batch of a block, and of once a step, by category.

    Attributes:
        forward_s, backward_s: of one micro-batch, everything included.
        once_s: of once a step: the optimizer, and reductions that happen once.
        by_category: of a micro-batch: compute, recompute, tensor_parallel, zero.
        once_by_category: of a step: zero, optimizer.
    """

    forward_s: float
    backward_s: float
    once_s: float
    by_category: dict[str, float]
    once_by_category: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A fully decided plan: its step time, and time and memory of each rank of the pipeline."""

    step_time_s: float
    stage_time_s: tuple[float, ...]
    time_by_category: dict[str, float]
    memory: tuple[StageMemory, ...]

    @property
    def peak_memory_bytes(self) -> int:
        """Return the largest peak over stages."""
        return max(stage.peak for stage in self.memory)


@dataclass(slots=True)
class Pricer:
    """Prices blocks, stages and plans of one trace on one cluster.

    Attributes:
        trace: of one micro-batch size.
        cluster: the devices.
        workload: optimizer and precision.
        recompute: pins the mode of every block.
        reference: whose frontiers are priced here, at this micro-batch size.
        tally: counts look-ups.
        frontiers: solves the problems of block classes.
    """

    trace: Trace
    cluster: Cluster
    workload: Workload
    recompute: str | None = None
    reference: Pricer | None = None
    tally: Tally = field(default_factory=Tally)
    frontiers: Frontiers = field(default_factory=Frontiers)
    _plain: dict[tuple[int, int, bool], Decision] = field(default_factory=dict)
    _decisions: dict[tuple[int, int, bool], tuple[Decision, ...]] = field(default_factory=dict)
    _bases: dict[tuple[int, int, object], _BlockBase] = field(default_factory=dict)
    _fastest_s: dict[tuple[int, int, bool], float] = field(default_factory=dict)
    _timers: dict[tuple[int, bool], Timer] = field(default_factory=dict)
    _shared: dict[int, frozenset[str]] | None = None
    _options: dict[tuple[object, ...], BlockOption] = field(default_factory=dict)
    _held: list[frozenset[str]] | None = None
    _by_device: dict[str, Pricer] = field(default_factory=dict)

    def decisions(
        self, block: int, tp: int, *, is_sequence_parallel: bool = False
    ) -> tuple[Decision, ...]:
        """Return the frontier of a block class at a tensor-parallel degree, fastest first.

        With `is_sequence_parallel` activations cross its borders as slices of tokens; without, the
        lean layout of the simple strategies is among them. With a `reference` pricer they are its
        frontier, priced here at this micro-batch size.
        """
        if self.reference is not None:
            return self.reference.decisions(block, tp, is_sequence_parallel=is_sequence_parallel)
        key = (block, tp, is_sequence_parallel)
        if key not in self._decisions:
            found = self.frontiers.decisions(
                self.trace.blocks[block],
                self.timer(tp),
                whole=self.whole_states(block),
                recompute=self.recompute,
                is_sequence_parallel=is_sequence_parallel,
                offloads="activations" in self.workload.offload,
            )
            if not is_sequence_parallel and tp > 1 and self.recompute in (None, "none"):
                lean = self.plain_decision(block, tp, lean=True)
                if all(lean.key != d.key for d in found):
                    found += (lean,)
            self._decisions[key] = found
        return self._decisions[key]

    def plain_decision(self, block: int, tp: int, *, lean: bool = False) -> Decision:
        """Return the fastest (or leanest) decision of a class that recomputes nothing."""
        if self.reference is not None:
            return self.reference.plain_decision(block, tp, lean=lean)
        key = (block, tp, lean)
        if key not in self._plain:
            self._plain[key] = self.frontiers.plain(
                self.trace.blocks[block], self.timer(tp), whole=self.whole_states(block), lean=lean
            )
        return self._plain[key]

    def fastest_s(self, block: int, tp: int, *, is_sequence_parallel: bool = False) -> float:
        """Return seconds below which no decision of a class is at this micro-batch size."""
        key = (block, tp, is_sequence_parallel)
        if key not in self._fastest_s:
            self._fastest_s[key] = self.frontiers.fastest_s(
                self.trace.blocks[block],
                self.timer(tp),
                whole=self.whole_states(block),
                is_sequence_parallel=is_sequence_parallel,
            )
        return self._fastest_s[key]

    def borders(self, tp: int) -> tuple[bool, ...]:
        """Return whether activations may cross borders of blocks whole, or as slices of tokens."""
        can_slice = tp > 1 and any(
            boundary_of(value, tp, True) != "R"
            for block in self.trace.blocks
            for value in block.inputs
        )
        return (False, True) if can_slice else (False,)

    def whole_states(self, block: int) -> frozenset[str]:
        """Return the states of a block class that several calls share."""
        if self._shared is None:
            self._shared = shared_states(self.trace)
        return self._shared.get(block, frozenset())

    def timer(self, tp: int, *, is_glue: bool = False) -> Timer:
        """Return the timer of a tensor-parallel degree; glue multiplies in the trace's dtype."""
        key = (tp, is_glue)
        if key not in self._timers:
            dtype = None if is_glue else self.workload.product_dtype
            self._timers[key] = Timer(
                self.cluster, tp, self.tally, dtype, self.workload.attention_kernel
            )
        return self._timers[key]

    def base(self, block: int, decision: Decision, tp: int) -> _BlockBase:
        """Return what a decision costs by itself."""
        key = (block, tp, decision.key)
        if key not in self._bases:
            self._bases[key] = self._make_base(block, decision, tp)
        return self._bases[key]

    def _make_base(self, block: int, decision: Decision, tp: int) -> _BlockBase:
        local = localize(
            self.trace.blocks[block],
            decision.axes,
            tp,
            frozenset() if decision.slices_shared else self.whole_states(block),
            is_sequence_parallel=decision.is_sequence_parallel,
            regathers=self.workload.engine.regathers_sequence,
        )
        times = self._op_times(local, tp)
        states = {state.name for state in local.block.states}
        summed = [times[op.name] for op in local.ops if op.op is None and op.inputs[0] in states]
        host = self.cluster.device.host
        is_redone = decision.recompute.mode in ("full", "selective")
        redone = [times[op.name] for op in redone_ops(local, decision.recompute)]
        redone += [times[name] for name in decision.inner if decision.recompute.mode == "none"]
        kept, accumulating, recompute = self.memory_views(local, decision)
        return _BlockBase(
            local=local,
            views=(kept, accumulating),
            recompute=recompute,
            compute_forward_s=sum(t.forward_s for t in times.values()),
            compute_backward_s=sum(t.backward_s for t in times.values()),
            comm_forward_s=sum(t.forward_comm_s for t in times.values()),
            comm_backward_s=sum(t.backward_comm_s for t in times.values())
            - sum(t.backward_comm_s for t in summed),
            summed_s=sum(t.backward_comm_s for t in summed),
            redo_s=sum(t.forward_s + t.forward_comm_s for t in redone)
            + is_redone * self._region_s(local, decision),
            redo_comm_s=sum(t.forward_comm_s for t in redone),
            deferred_bytes=sum(op.value_bytes for op in local.ops if op.parameter_grads),
            host_forward_s=len(local.ops) * host.op_forward,
            host_backward_s=sum(bool(op.grads or op.parameter_grads) for op in local.ops)
            * host.op_backward
            + len(redone) * host.op_forward
            + is_redone * host.region,
            weight_backward_s=sum(
                times[op.name].backward_s / 2 for op in local.ops if _has_weight_gradient(op)
            ),
            away_s=away_s(local, self.cluster) if decision.recompute.mode == "offload" else 0.0,
        )

    def _region_s(self, local: LocalBlock, decision: Decision) -> float:
        """Return seconds of the host around a recomputed region, where kernels run on the host."""
        host = self.timer(local.degree).host
        runs = 2 if decision.recompute.mode == "selective" else 0
        return host.region + runs * len(local.ops) * host.marked_op

    def memory_views(
        self, local: LocalBlock, decision: Decision
    ) -> tuple[LocalBlock, LocalBlock, Recompute]:
        """Return a block as its tensors live under the engine, and what its marks really keep.

        The first is of a step's first micro-batch, the second of later ones.
        """
        engine, recompute = self.workload.engine, decision.recompute
        kept = with_loss(folded(local, decision.inner), engine.loss)
        if self.workload.is_compiled and not local.block.is_glue:
            kept = joined(kept)
            recompute = needed_marks(kept, recompute)
        is_fused = engine.has_gradient_buffer and engine.fuses_gradients and not local.block.is_glue
        return kept, _without_gradients(kept) if is_fused else kept, recompute

    def _op_times(self, local: LocalBlock, tp: int) -> dict[str, OpTime]:
        """Return the seconds of each op; a joint kernel counts with its first."""
        timer = self.timer(tp, is_glue=local.block.is_glue)
        times = {op.name: timer.op_time(op) for op in local.ops}
        is_compiled = self.workload.is_compiled and (
            self.workload.engine.compiles_glue or not local.block.is_glue
        )
        for kernel in fused_kernels(local) if is_compiled else ():
            if len(kernel.ops) > 1:
                times |= dict.fromkeys(kernel.ops, OpTime(forward_s=0.0, backward_s=0.0))
                times[kernel.ops[0]] = OpTime(
                    forward_s=timer.memory_s(kernel.forward_bytes),
                    backward_s=timer.memory_s(kernel.backward_bytes),
                )
        return times

    def group(self, call: int, decision: Decision, setting: Setting, held: set[str]) -> GroupBytes:
        """Return the parameter bytes of a call; parameters in `held` are there already.

        Args:
            call: index into the chain.
            decision: how the block runs.
            setting: degrees.
            held: canonical FQNs that earlier calls of the stage hold; the call's own are added.
        """
        block = self.trace.calls[call].block
        local = self.base(block, decision, setting.tp).local
        ratio = self.workload.parameter_bytes_per_traced_byte
        canonical = {fqn: group[0] for group in self.trace.shared for fqn in group}
        stored = trained = gathered = grads = largest = tensors = 0
        states = self.trace.blocks[block].states
        for state, fqn in zip(states, self.trace.calls[call].states, strict=True):
            name = canonical.get(fqn, fqn)
            if name in held:
                continue
            held.add(name)
            nbytes = local.state_bytes[state.name]
            if not state.is_parameter:
                stored += nbytes
                continue
            stored += nbytes * ratio
            gathered += nbytes
            largest = max(largest, nbytes * ratio)
            if state.is_trained:
                trained += nbytes * ratio
                grads += nbytes
                tensors += 1
        return GroupBytes(
            stored=stored,
            trained=trained,
            gathered=gathered,
            gathered_grads=grads,
            largest=largest,
            trained_tensors=tensors,
        )

    def own_group(self, call: int, decision: Decision, setting: Setting) -> GroupBytes:
        """Return the parameters that a call gathers, reduces and updates.

        Without a pipeline a parameter of several calls counts with the first; with one, calls that
        share it usually lie on different stages, and each counts it.
        """
        held = set(self._shared_before(call)) if setting.pp == 1 else set()
        return self.group(call, decision, setting, held)

    def price(self, call: int, decision: Decision, setting: Setting) -> BlockPrice:
        """Return the seconds of a call under a setting."""
        block = self.trace.calls[call].block
        base = self.base(block, decision, setting.tp)
        group = self.own_group(call, decision, setting)
        comm = data_parallel_times(group, setting, self.workload, self.cluster)
        is_gathered_again = regathers(setting, is_glue=self.trace.blocks[block].is_glue)
        regather_s = comm.gather_s if is_gathered_again else 0.0
        forward, backward = base.forward_s, base.backward_s
        # Gradients of whole parameters that see slices of tokens: summed once into a buffer.
        has_buffer = self.workload.engine.has_gradient_buffer
        summed_s = base.summed_s if has_buffer else 0.0
        tensor_s = base.comm_forward_s + base.comm_backward_s + base.summed_s - summed_s
        backward += base.summed_s - summed_s
        again_s = regather_s + comm.reduce_s
        copy_f, copy_b, copy_once = self._copy_times(group, setting, is_gathered_again)
        once_zero_s = comm.once_gather_s + comm.once_reduce_s
        if self.overlaps(setting):
            slowed = interference(data_parallel_link(setting, self.cluster))
            exposed_f = exposed_s(comm.gather_s, forward, slowed)
            exposed_b = exposed_s(again_s, backward, slowed)
            if self.workload.engine.overlaps_reduction:
                once_zero_s = exposed_s(comm.once_gather_s, forward, slowed)
                once_zero_s += exposed_s(comm.once_reduce_s, backward, slowed)
        else:
            exposed_f, exposed_b = comm.gather_s, again_s
        exposed_f, exposed_b = exposed_f + copy_f, exposed_b + copy_b
        host_f, host_b = self.host_seconds(base, group, setting)
        forward, backward = forward + host_f, backward + host_b
        once_zero_s += copy_once
        optimizer_s = self._optimizer_time(group, setting)
        return BlockPrice(
            forward_s=forward + exposed_f,
            backward_s=backward + exposed_b,
            once_s=once_zero_s + optimizer_s + summed_s,
            by_category={
                "compute": base.compute_forward_s + base.compute_backward_s + host_f + host_b,
                "recompute": base.redo_s,
                **({"offload": 2 * base.away_s} if base.away_s else {}),
                "tensor_parallel": tensor_s,
                "zero": exposed_f + exposed_b,
            },
            once_by_category={
                "zero": once_zero_s,
                "optimizer": optimizer_s,
                "tensor_parallel": summed_s,
            },
        )

    def _copy_times(
        self, group: GroupBytes, setting: Setting, is_gathered_again: bool
    ) -> tuple[float, float, float]:
        """Return seconds around collectives: forward, backward, once a step."""
        gather, reduce = self._around_collectives(group, setting)
        if setting.zero_stage == 3:
            return gather, gather * is_gathered_again + reduce, 0.0
        if setting.zero_stage == 2:
            return 0.0, reduce, gather
        return 0.0, 0.0, gather + reduce

    def _around_collectives(self, group: GroupBytes, setting: Setting) -> tuple[float, float]:
        """Return seconds of copies and of the host around one gather and one reduction."""
        timer = self.timer(setting.tp)
        gather, reduce = map(timer.memory_s, copy_bytes(group, setting, self.workload))
        if is_wrapped(group, setting, self.workload):
            gather, reduce = gather + timer.host.gather, reduce + timer.host.reduce
        return gather, reduce

    def host_seconds(
        self, base: _BlockBase, group: GroupBytes, setting: Setting
    ) -> tuple[float, float]:
        """Return seconds that the host adds to a block's forward and to its backward.

        Hooks of FSDP, where kernels run on the host; ops have theirs in their own times. A host
        beside the device adds what it takes longer than the device: a step that is bound by
        launches lasts as long as they do.
        """
        hooks_s = is_wrapped(group, setting, self.workload) * self.cluster.device.host.sharded_block
        if not overlaps_communication(self.cluster):
            return hooks_s / 2, hooks_s / 2
        forward_s, backward_s = (
            base.host_forward_s + hooks_s / 2,
            base.host_backward_s + hooks_s / 2,
        )
        return max(0.0, forward_s - base.forward_s), max(0.0, backward_s - base.backward_s)

    def zero_seconds(self, group: GroupBytes, setting: Setting) -> tuple[float, float]:
        """Return seconds of one gather of a group's parameters and one reduction of its gradients.

        Copies around them included. Stage 0 never gathers and all-reduces; the others
        reduce-scatter.
        """
        comm = data_parallel_times(group, setting, self.workload, self.cluster)
        gather, reduce = self._around_collectives(group, setting)
        return (
            comm.gather_s + comm.once_gather_s + gather,
            comm.reduce_s + comm.once_reduce_s + reduce,
        )

    def overlaps(self, setting: Setting) -> bool:
        """Return whether gathers and reductions run beside the computation.

        FSDP over one device copies its parameters in on the stream that computes.
        """
        return overlaps_communication(self.cluster) and (
            setting.dp > 1 or setting.offload == "none"
        )

    def _optimizer_time(self, group: GroupBytes, setting: Setting) -> float:
        traffic = optimizer_bytes(group, setting, self.workload)
        if traffic == 0:
            return 0.0
        device = self.cluster.device
        kernels_s = self.tally.add(device.optimizer_time_s(traffic))
        launches_s = group.trained_tensors * device.host.optimizer_tensor
        is_beside = overlaps_communication(self.cluster)
        device_s = max(kernels_s, launches_s) if is_beside else kernels_s + launches_s
        # Kernels are launched by the same host: a step there is never faster than their launches.
        is_offloaded = setting.offload != "none"
        return max(device_s, host_optimizer_s(traffic, self.cluster)) if is_offloaded else device_s

    def stage_block(
        self,
        call: int,
        decision: Decision,
        setting: Setting,
        held: set[str],
        values: set[str] | None = None,
    ) -> StageBlock:
        """Return a call as the memory model reads it.

        Args:
            call, decision, setting, held: as in `group`.
            values: activations that earlier calls of the stage keep, to count each once; those that
                this call keeps are added. None: this call counts all that it keeps.
        """
        block = self.trace.calls[call].block
        base = self.base(block, decision, setting.tp)
        return StageBlock(
            memory=base.memory,
            accumulating=base.accumulating,
            group=self.group(call, decision, setting, held),
            is_glue=self.trace.blocks[block].is_glue,
            input_bytes=sum(base.local.inputs.values()),
            shared_bytes=0 if values is None else self._shared_bytes(call, base, values),
            deferred_bytes=base.deferred_bytes,
        )

    def stage_blocks(
        self, calls: Sequence[int], decisions: Sequence[Decision], setting: Setting
    ) -> tuple[StageBlock, ...]:
        """Return the calls of a stage as the memory model reads them; `decisions` one per call.

        What several calls hold counts once: with the first, but a parameter's gradient is made by
        the backward of the last call that reads it, which runs first.
        """
        held: set[str] = set()
        values: set[str] = set()
        blocks = [
            self.stage_block(call, decision, setting, held, values)
            for call, decision in zip(calls, decisions, strict=True)
        ]
        canonical = {fqn: group[0] for group in self.trace.shared for fqn in group}
        readers: dict[str, list[tuple[int, int]]] = {}
        for place, (call, decision) in enumerate(zip(calls, decisions, strict=True)):
            trace_call = self.trace.calls[call]
            local = self.base(trace_call.block, decision, setting.tp).local
            states = self.trace.blocks[trace_call.block].states
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

    def _shared_bytes(self, call: int, base: _BlockBase, values: set[str]) -> int:
        trace_call, local, memory = self.trace.calls[call], base.local, base.memory
        inputs = self.trace.blocks[trace_call.block].inputs
        names = zip((v.name for v in inputs), trace_call.args, strict=True)
        kept = {value: name for name, value in names if name in memory.held_inputs}
        shared = sum(local.inputs[name] for value, name in kept.items() if value in values)
        outs = zip(local.outputs, trace_call.outs, strict=True)
        values |= kept.keys() | {value for name, value in outs if name in memory.held_outputs}
        return shared

    def side_bytes(self, calls: Sequence[int], decisions: Sequence[Decision], tp: int) -> int:
        """Return bytes of side values that one micro-batch holds in a stage, each once."""
        sizes: dict[str, int] = {}
        side = dict(self.trace.side)
        for call, decision in zip(calls, decisions, strict=True):
            trace_call = self.trace.calls[call]
            kept = self.base(trace_call.block, decision, tp).memory.side
            inputs = self.trace.blocks[trace_call.block].inputs
            for value, argument in zip(inputs, trace_call.args, strict=True):
                if value.name in kept and argument in side:
                    sizes[argument] = side[argument]
        return sum(sizes.values())

    def option(self, call: int, decision: Decision, setting: Setting, live: int) -> BlockOption:
        """Return a decision as the linear search sees it: every number an upper estimate.

        Memory is in units of `memory_unit`, time in ticks of a nanosecond. The last block of the
        chain runs its backward first, so what it keeps counts as working memory only.
        """
        is_last = call == len(self.trace.calls) - 1
        shared = self._shared_before(call) if setting.pp == 1 else frozenset()
        trace_call = self.trace.calls[call]
        if setting.schedule == "interleaved":  # a block costs the same in any stage of a rank
            setting = replace(setting, schedule="1f1b", virtual_stages=1)
        key = (trace_call.block, decision.key, setting, is_last and live, shared)
        if key not in self._options:
            self._options[key] = self._make_option(call, decision, setting, live, set(shared))
        return self._options[key]

    def _make_option(
        self, call: int, decision: Decision, setting: Setting, live: int, held: set[str]
    ) -> BlockOption:
        block = self.stage_block(call, decision, setting, held)
        price = self.price(call, decision, setting)
        group, memory = block.group, block.memory
        static = static_bytes(group, setting, self.workload.optimizer)
        wrapped = uses_fsdp(setting, self.workload.mixed_precision != "none")
        resident = static.parameters + static.optimizer
        grads, kept = static.gradients, memory.kept
        working = max(
            memory.backward_peak - memory.kept,
            block.input_bytes + memory.forward_peak - memory.kept,
        )
        if not wrapped:
            if setting.num_microbatches > 1:
                working = max(working, block.accumulating.backward_peak - memory.kept)
        elif block.is_glue:
            resident += group.gathered + group.gathered_grads
        elif setting.zero_stage <= 1:
            resident += group.gathered
            grads = max(grads, group.gathered_grads)
            working += group.gathered_grads
        elif setting.zero_stage == 2:
            resident += group.gathered
            working += group.gathered_grads
        else:
            working += 2 * group.gathered + group.gathered_grads
            if setting.offload != "none":
                working += -(-group.stored // setting.dp)
        is_last = call == len(self.trace.calls) - 1
        if is_last and live == 1 and setting.schedule != "gpipe":
            working, kept = working + kept, 0
        if setting.num_microbatches == 1 and not wrapped and not is_last:
            kept, grads = max(kept, grads), 0
        unit = self.memory_unit
        return BlockOption(
            forward=_ticks(price.forward_s),
            backward=_ticks(price.backward_s),
            once=_ticks(price.once_s),
            kept=-(-kept // unit),
            static=-(-(resident + grads) // unit),
            working=-(-working // unit),
        )

    def least_option(
        self, call: int, decisions: Sequence[Decision], setting: Setting
    ) -> BlockOption:
        """Return an option that no decision beats in time, once and static memory.

        Nothing of it needs a walk of what the decisions keep, so it is cheap.
        """
        shared = self._shared_before(call) if setting.pp == 1 else frozenset()
        time, once, static = [], [], []
        for decision in decisions:
            price = self.price(call, decision, setting)
            group = self.group(call, decision, setting, set(shared))
            held = static_bytes(group, setting, self.workload.optimizer)
            time.append(_ticks(price.forward_s) + _ticks(price.backward_s))
            once.append(_ticks(price.once_s))
            static.append(held.parameters + held.optimizer)
        return BlockOption(
            forward=min(time),
            backward=0,
            once=min(once),
            kept=0,
            static=min(static) // self.memory_unit,
            working=0,
        )

    def alike(self, setting: Setting) -> list[list[int]]:
        """Return the calls of each kind that `option` tells apart."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for call, trace_call in enumerate(self.trace.calls):
            shared = self._shared_before(call) if setting.pp == 1 else frozenset()
            is_last = call == len(self.trace.calls) - 1
            kinds.setdefault((trace_call.block, is_last, shared), []).append(call)
        return list(kinds.values())

    def _shared_before(self, call: int) -> frozenset[str]:
        """Return the parameters of a call that earlier calls read too."""
        if self._held is None:
            canonical = {fqn: group[0] for group in self.trace.shared for fqn in group}
            seen: set[str] = set()
            self._held = []
            for trace_call in self.trace.calls:
                own = {canonical.get(fqn, fqn) for fqn in trace_call.states}
                self._held.append(frozenset(own & seen))
                seen |= own
        return self._held[call]

    @property
    def memory_unit(self) -> int:
        """Return the bytes of one unit of memory in the search: about 2**-20 of the capacity."""
        return max(1, self.cluster.capacity_bytes >> 20)

    def boundary_s(
        self, setting: Setting, cut: int, *, stage: int | None = None, is_sliced: bool = False
    ) -> float:
        """Return the seconds of sending one micro-batch's activations over a cut, one way.

        Args:
            setting: degrees and their order.
            cut: index of the first call after it.
            stage: before it; None: whichever is farthest from the next.
            is_sliced: as in `transfer_s`.
        """
        nbytes = self.trace.crossing_bytes[cut - 1]
        return transfer_s(
            nbytes, setting, self.workload, self.cluster, stage=stage, is_sliced=is_sliced
        )

    def on_stage(self, setting: Setting, stage: int) -> Pricer:
        """Return the pricer of a stage's own type of device; this one where all are alike.

        Ranks of a stage on several types wait for the slowest.
        """
        if not self.cluster.slower:
            return self
        try:
            own = self.cluster.on_stage(setting, stage)
        except ValueError:
            own = self.cluster.on_slowest()
        if own.device.name not in self._by_device:
            self._by_device[own.device.name] = Pricer(
                trace=self.trace,
                cluster=own,
                workload=self.workload,
                recompute=self.recompute,
                tally=self.tally,
                frontiers=self.frontiers,
            )
        return self._by_device[own.device.name]

    def slowness(self, setting: Setting, stage: int) -> float:
        """Return how many times longer a stage's type takes for all blocks than the first type."""
        own = self.on_stage(setting, stage)
        if own.cluster.device is self.cluster.device:
            return 1.0
        calls = [
            (call, self.plain_decision(trace_call.block, setting.tp))
            for call, trace_call in enumerate(self.trace.calls)
        ]
        own_s, first_s = (
            sum(p.forward_s + p.backward_s for p in (x.price(c, d, setting) for c, d in calls))
            for x in (own, self)
        )
        return max(1.0, own_s / first_s)

    def action_s(self, setting: Setting) -> float:
        """Return seconds of the host in a forward or a backward of a pipeline stage, ops apart."""
        return self.timer(setting.tp).host.pipeline_action if setting.pp > 1 else 0.0

    def plan_price(
        self, setting: Setting, ends: Sequence[int], decisions: Sequence[Decision]
    ) -> PlanPrice:
        """Return the exact price of a decided plan.

        Args:
            setting: degrees and sizes.
            ends: per stage the index after its last call; stage s is on rank s % pp.
            decisions: one per call.

        Returns:
            Step time: that of the pipeline and the slowest once-a-step part.
        """
        spans = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
        rank_s, weights_s, memories, once = [], [], [], []
        stage_s = [0.0] * len(spans)
        totals: dict[str, float] = dict.fromkeys(
            ("compute", "recompute", "tensor_parallel", "zero", "optimizer", "pipeline"), 0.0
        )
        m = setting.num_microbatches
        slowest: tuple[float, dict[str, float]] = (-1.0, {})
        for rank in range(setting.pp):
            device = self.on_stage(setting, rank)
            own = range(rank, len(spans), setting.pp)
            calls = [call for stage in own for call in spans[stage]]
            prices = [device.price(c, decisions[c], setting) for c in calls]
            transfer = 0.0
            for stage in own:
                sent_s = self._stage_transfer_s(setting, stage, spans, decisions)
                transfer += sent_s
                each = (device.price(c, decisions[c], setting) for c in spans[stage])
                stage_s[stage] = sum(p.forward_s + p.backward_s for p in each) + sent_s
            seconds = sum(p.forward_s + p.backward_s for p in prices) + transfer
            rank_s.append(seconds)
            weights_s.append(self._weights_s(setting, calls, decisions))
            once.append(sum(p.once_s for p in prices))
            by_category = _summed(p.by_category for p in prices)
            if seconds > slowest[0]:
                slowest = (seconds, {**by_category, "pipeline": transfer})
            memories.append(device._rank_memory(setting, rank, spans, decisions))
        by_stage = stage_s if setting.virtual_stages > 1 else ()
        pipeline_s = pipeline_step_s(rank_s, setting, weights_s, by_stage)
        step = pipeline_s + max(once)
        for name, seconds in slowest[1].items():
            totals[name] = totals.get(name, 0.0) + m * seconds
        totals["pipeline"] += pipeline_s - m * max(rank_s)
        index = once.index(max(once))
        last = self.on_stage(setting, index)
        parts = _summed(
            last.price(c, decisions[c], setting).once_by_category
            for s in range(index, len(spans), setting.pp)
            for c in spans[s]
        )
        for name, seconds in parts.items():
            totals[name] += seconds
        return PlanPrice(
            step_time_s=step,
            stage_time_s=tuple(rank_s),
            time_by_category=totals,
            memory=tuple(memories),
        )

    def _weights_s(
        self, setting: Setting, calls: Sequence[int], decisions: Sequence[Decision]
    ) -> float:
        """Return the seconds of one micro-batch's weight gradients that a split backward defers."""
        if setting.schedule != "zero_bubble":
            return 0.0
        bases = (self.base(self.trace.calls[c].block, decisions[c], setting.tp) for c in calls)
        return sum(base.weight_backward_s for base in bases)

    def _stage_transfer_s(
        self,
        setting: Setting,
        stage: int,
        spans: Sequence[range],
        decisions: Sequence[Decision],
    ) -> float:
        """Return seconds of one micro-batch at the borders of a stage: transfers and the host."""
        is_sliced = decisions[spans[stage][0]].is_sequence_parallel
        seconds = 0.0
        if stage > 0:
            seconds += self.sent_s(setting, spans[stage][0], stage - 1, is_sliced)
        if stage < len(spans) - 1:
            seconds += self.sent_s(setting, spans[stage + 1][0], stage, is_sliced)
        return seconds + 2 * self.action_s(setting)

    def sent_s(self, setting: Setting, cut: int, stage: int, is_sliced: bool) -> float:
        """Return the seconds of sending what a stage hands on; the last rank sends to the first."""
        rank = stage % setting.pp
        sender = rank if rank < setting.pp - 1 else None
        return self.boundary_s(setting, cut, stage=sender, is_sliced=is_sliced)

    def _rank_memory(
        self, setting: Setting, rank: int, spans: Sequence[range], decisions: Sequence[Decision]
    ) -> StageMemory:
        """Return the memory of a rank of the pipeline, with all its stages."""
        blocks: list[StageBlock] = []
        parts = []
        for stage in range(rank, len(spans), setting.pp):
            calls = spans[stage]
            own = [decisions[c] for c in calls]
            blocks += self.stage_blocks(calls, own, setting)
            parts.append(self.part_bytes(setting, stage, spans, own))
        every = [c for s in range(rank, len(spans), setting.pp) for c in spans[s]]
        return stage_memory(
            blocks,
            setting,
            self.workload.optimizer,
            stage=rank,
            is_mixed=self.workload.mixed_precision != "none",
            is_gloo=not overlaps_communication(self.cluster),
            input_bytes=self.batch_bytes(setting),
            standing_bytes=self.standing_bytes(every, decisions, setting.tp),
            parts=parts,
            reserve=self.cluster.reserved_bytes,
            engine=self.workload.engine,
        )

    def part_bytes(
        self,
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
        crossing = self.trace.crossing_bytes
        entering = crossing[calls[0] - 1] if stage > 0 else 0
        leaving = crossing[calls[-1]] if stage < len(spans) - 1 else 0
        if decisions[0].is_sequence_parallel:
            entering, leaving = -(-entering // setting.tp), -(-leaving // setting.tp)
        return PartBytes(
            num_blocks=len(calls),
            side=self.side_bytes(calls, decisions, setting.tp),
            entering=entering,
            leaving=leaving,
        )

    def standing_bytes(self, calls: Sequence[int], decisions: Sequence[Decision], tp: int) -> int:
        """Return bytes that an engine holds beside a step's tensors, for as long as it trains.

        Tensors that stand for weight gradients, one for each shape, and logits in the buffers of a
        pipeline engine.
        """
        engine, last = self.workload.engine, calls[-1]
        nbytes = 0
        if engine.output_buffers:
            local = self.base(self.trace.calls[last].block, decisions[last], tp).local
            nbytes = engine.output_buffers * logits_bytes(local)
        if engine.keeps_stand_ins:
            nbytes += self._stand_in_bytes(calls, decisions, tp)
        return nbytes

    def _stand_in_bytes(self, calls: Sequence[int], decisions: Sequence[Decision], tp: int) -> int:
        sizes: dict[tuple[object, ...], int] = {}
        for block, decision in {
            (self.trace.calls[c].block, decisions[c].key): (self.trace.calls[c].block, decisions[c])
            for c in calls
        }.values():
            local = self.base(block, decision, tp).local
            if local.block.is_glue:
                continue
            products = {n for op in local.ops if op.op and op.op.kind == "gemm" for n in op.inputs}
            for state in local.block.states:
                if state.name in products and state.is_trained and len(state.shape) > 1:
                    nbytes = local.state_bytes[state.name]
                    sizes[(state.shape, local.state_placements[state.name])] = nbytes
        return sum(sizes.values())

    def batch_bytes(self, setting: Setting) -> int:
        """Return bytes of this rank's share of the batch for one step.

        Micro-batches are slices of it, but copies where the batch is not dimension 0.
        """
        dims = self.trace.batch_dims or (0,) * len(self.trace.inputs)
        pairs = zip(self.trace.inputs, dims, strict=True)
        nbytes = sum(value.nbytes * (2 if dim else 1) for value, dim in pairs)
        return nbytes * setting.num_microbatches


def _has_weight_gradient(op: LocalOp) -> bool:
    """Return whether an op's backward is two equal products, one of them for its weights."""
    traced = op.op
    return (
        traced is not None
        and traced.kind == "gemm"
        and traced.forward_flops > 0
        and round(traced.backward_flops / traced.forward_flops) >= 2
    )


def _without_gradients(local: LocalBlock) -> LocalBlock:
    """Return a block whose products add their weight gradients to a buffer as they make them."""
    return replace(local, ops=tuple(replace(op, parameter_grads=()) for op in local.ops))


def _ticks(seconds: float) -> int:
    return -int(-seconds // TICK_S)


def _summed(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
