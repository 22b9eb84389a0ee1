"""What a way to run a block costs by itself, whatever the setting around it: work and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.context_parallel import is_exchanged, with_context_held, with_context_times
from autoplan.decomposed import beside_products
from autoplan.deferral import op_parts, released_bytes
from autoplan.expert_parallel import EXCHANGE
from autoplan.frames import with_attention_held
from autoplan.frontiers import Decision
from autoplan.fusion import fused_kernels, joined, with_narrow_operands
from autoplan.inner_recompute import folded
from autoplan.liveness import BlockMemory, block_memory, needed_marks, redone_ops
from autoplan.local_blocks import LocalBlock
from autoplan.losses import with_loss
from autoplan.offload import away_s
from autoplan.plan import Recompute
from autoplan.settings import Workload
from autoplan.step_costs import interference
from autoplan.times import OpTime, Timer

__all__ = ["BlockWork", "Deferred", "LayoutWork", "layout_work", "make_work", "memory_views"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """What a split backward of a block leaves for later.

    Attributes:
        backward_s: seconds of gradients of parameters.
        nbytes: of gradients that are kept for it, of the results of ops that read parameters.
        released_bytes: kept ones that it does not need, where no block after this has parameters.
        groups: ops from each of which the backward starts again.
        nodes: ops that have a backward, and parameters that get a gradient.
    """

    backward_s: float
    nbytes: int
    released_bytes: int
    groups: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class LayoutWork:
    """What a layout costs, whatever is recomputed.

    Attributes:
        local: the block as one rank runs it.
        times: of each op.
        total: the sum of them.
        summed_s: of all-reduces of the gradients of whole parameters.
        context_s: of exchanges of context parallelism that nothing runs beside, which the
            communication of `total` contains.
    """

    local: LocalBlock
    times: dict[str, OpTime]
    total: OpTime
    summed_s: float
    context_s: float = 0.0

    @cached_property
    def exchange_s(self) -> float:
        """Return the seconds in which rows go to experts and back, and their gradients."""
        exchanged = (op.name for op in self.local.ops if op.op and op.op.target == EXCHANGE)
        found = [self.times[name] for name in exchanged]
        return sum(time.forward_comm_s + time.backward_comm_s for time in found)

    @cached_property
    def deferred(self) -> Deferred:
        """Return what a split backward leaves for later; most searches never ask."""
        parts, ops = op_parts(self.local), self.local.ops
        joint = [op for op in ops if parts[op.name] == "joint"]
        later = [self.times[op.name] for op in ops if parts[op.name] == "weights"]
        return Deferred(
            backward_s=sum(self.times[op.name].deferred_s for op in joint)
            + sum(time.backward_s + time.backward_comm_s for time in later),
            nbytes=sum(op.value_bytes for op in joint),
            released_bytes=released_bytes(self.local, parts),
            groups=len(joint),
            nodes=sum(bool(op.grads) + len(op.parameter_grads) for op in ops),
        )


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """What a decision costs by itself at a tensor-parallel degree.

    `layout`: that it is of. `away_s`: of copying what is saved to the host in the forward, or back
    in the backward.

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
    layout: LayoutWork
    away_s: float
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    @property
    def deferred(self) -> Deferred:
        """Return what a split backward leaves for later."""
        return self.layout.deferred

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


def layout_work(local: LocalBlock, timer: Timer, workload: Workload) -> LayoutWork:
    """Return what all decisions of one layout have in common."""
    times = _op_times(local, timer, workload)
    states = {state.name for state in local.block.states}
    summed = (times[op.name] for op in local.ops if op.op is None and op.inputs[0] in states)
    return LayoutWork(
        local=local,
        times=times,
        total=OpTime(
            forward_s=sum(t.forward_s for t in times.values()),
            backward_s=sum(t.backward_s for t in times.values()),
            forward_comm_s=sum(t.forward_comm_s for t in times.values()),
            backward_comm_s=sum(t.backward_comm_s for t in times.values()),
        ),
        summed_s=sum(t.backward_comm_s for t in summed),
        context_s=sum(
            times[op.name].forward_comm_s + times[op.name].backward_comm_s
            for op in local.ops
            if is_exchanged(op)
        ),
    )


def make_work(
    layout: LayoutWork, decision: Decision, timer: Timer, workload: Workload
) -> BlockWork:
    """Return what a decision of a layout costs."""
    local, times, total = layout.local, layout.times, layout.total
    host = timer.device.host
    is_redone = decision.recompute.mode in ("full", "selective")
    redone = [times[op.name] for op in redone_ops(local, decision.recompute)]
    redone += [times[name] for name in decision.inner if decision.recompute.mode == "none"]
    kept, accumulating, recompute = memory_views(local, decision, workload)
    return BlockWork(
        local=local,
        views=(kept, accumulating),
        recompute=recompute,
        compute_forward_s=total.forward_s,
        compute_backward_s=total.backward_s,
        comm_forward_s=total.forward_comm_s,
        comm_backward_s=total.backward_comm_s - layout.summed_s,
        summed_s=layout.summed_s,
        redo_s=sum(t.forward_s + t.forward_comm_s for t in redone)
        + is_redone * _region_s(local, decision, timer),
        redo_comm_s=sum(t.forward_comm_s for t in redone),
        layout=layout,
        host_forward_s=len(local.ops) * host.op_forward,
        host_backward_s=sum(bool(op.grads or op.parameter_grads) for op in local.ops)
        * host.op_backward
        + len(redone) * host.op_forward
        + is_redone * host.region,
        away_s=away_s(local, timer.cluster) if decision.recompute.mode == "offload" else 0.0,
    )


def _region_s(local: LocalBlock, decision: Decision, timer: Timer) -> float:
    """Return seconds of the host around a recomputed region, where kernels run on the host."""
    host = timer.host
    runs = 2 if decision.recompute.mode == "selective" else 0
    return host.region + runs * len(local.ops) * host.marked_op


def memory_views(
    local: LocalBlock, decision: Decision, workload: Workload
) -> tuple[LocalBlock, LocalBlock, Recompute]:
    """Return a block as its tensors live under the engine, and what its marks really keep.

    The first is of a step's first micro-batch, the second of later ones.
    """
    engine, recompute = workload.engine, decision.recompute
    own = with_context_held(local, workload)
    kept = with_loss(folded(own, decision.inner), engine.loss)
    if engine.holds_attention:
        kept = with_attention_held(kept)
    kept = replace(kept, is_reentrant=engine.reenters)
    if workload.is_compiled and not local.block.is_glue:
        kept = joined(kept)
        recompute = needed_marks(kept, recompute)
        if workload.product_dtype is not None:
            kept = with_narrow_operands(kept)
    is_fused = engine.has_gradient_buffer and engine.fuses_gradients and not local.block.is_glue
    return kept, _without_gradients(kept) if is_fused else kept, recompute


def _op_times(local: LocalBlock, timer: Timer, workload: Workload) -> dict[str, OpTime]:
    """Return the seconds of each op; a joint kernel counts with its first."""
    times = {op.name: timer.op_time(op) for op in local.ops}
    times = with_context_times(local, times, timer, workload)
    is_compiled = workload.is_compiled and (
        workload.engine.compiles_glue or not local.block.is_glue
    )
    for kernel in fused_kernels(local) if is_compiled else ():
        if len(kernel.ops) > 1:
            times |= dict.fromkeys(kernel.ops, OpTime(forward_s=0.0, backward_s=0.0))
            times[kernel.ops[0]] = OpTime(
                forward_s=timer.memory_s(kernel.forward_bytes),
                backward_s=timer.memory_s(kernel.backward_bytes),
            )
    if workload.engine.decomposes:
        return beside_products(local, times, timer.degree, interference(timer.link))
    return times


def _without_gradients(local: LocalBlock) -> LocalBlock:
    """Return a block whose products add their weight gradients to a buffer as they make them."""
    return replace(local, ops=tuple(replace(op, parameter_grads=()) for op in local.ops))
