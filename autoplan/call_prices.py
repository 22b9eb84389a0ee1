"""Seconds of a block under a setting: its work, and what data parallelism and the optimizer add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.block_work import BlockWork
from autoplan.cluster import Cluster
from autoplan.offload import host_optimizer_s
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import (
    Extreme,
    copy_bytes,
    data_parallel_link,
    data_parallel_times,
    exposed_s,
    interference,
    is_wrapped,
    optimizer_bytes,
    regathers,
)
from autoplan.times import Timer, overlaps_communication

__all__ = [
    "BlockPrice",
    "CallSeconds",
    "GroupPrice",
    "call_price",
    "call_seconds",
    "group_price",
    "host_seconds",
    "overlaps",
    "split_seconds",
    "zero_seconds",
]

# What the host takes for a split backward, in backwards of an op of no size. Source: torch 2.13 on
# one CPU core, chains of 2 to 16 GPT blocks, 87 to 689 autograd nodes, 12 to 96 groups.
_SPLIT_NODE = 0.3  # a node, which Python visits twice to find the groups
_SPLIT_GROUP = 6.0  # a backward that starts again from a group
_SPLIT_BELOW = 0.025  # a node below it, which that backward visits to count what it waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """Seconds of one micro-batch of a block, and of once a step, by category.

    Attributes:
        forward_s, backward_s: of one micro-batch, everything included.
        once_s: of once a step: the optimizer, and reductions that happen once.
        by_category: of a micro-batch: compute, recompute, tensor_parallel, zero, and where there
            are any offload, context_parallel.
        once_by_category: of a step: zero, optimizer, tensor_parallel, pipeline.
    """

    forward_s: float
    backward_s: float
    once_s: float
    by_category: dict[str, float]
    once_by_category: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSeconds:
    """Seconds of a call under a setting: numbers, or arrays [decision].

    Attributes:
        forward_s, backward_s, once_s: as in `BlockPrice`.
        host_forward_s, host_backward_s: of them, what the host adds.
        zero_s, once_zero_s: of them, what data parallelism adds.
    """

    forward_s: Any
    backward_s: Any
    once_s: Any
    host_forward_s: Any
    host_backward_s: Any
    zero_s: Any
    once_zero_s: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrice:
    """What parameters add under a setting, whatever the block computes with them.

    Attributes:
        gather_s: seconds of collectives before a forward.
        again_s: of collectives around a backward.
        once_gather_s, once_reduce_s: of collectives once a step.
        copy_forward_s, copy_backward_s, copy_once_s: of copies and of the host around them.
        optimizer_s: of the optimizer, once a step.
        hooks_s: of the host in hooks of FSDP, forward and backward.
    """

    gather_s: float
    again_s: float
    once_gather_s: float
    once_reduce_s: float
    copy_forward_s: float
    copy_backward_s: float
    copy_once_s: float
    optimizer_s: float
    hooks_s: float


def group_price(
    group: GroupBytes, setting: Setting, workload: Workload, timer: Timer, *, is_glue: bool
) -> GroupPrice:
    """Return the seconds of collectives and of the optimizer for a call's parameters.

    They depend on the degrees, the ZeRO stage, offload and the schedule, not on micro-batches.

    Args:
        group: the parameters that the call gathers, reduces and updates.
        setting, workload, timer: as in `call_price`.
        is_glue: whether the call is glue between blocks.
    """
    comm = data_parallel_times(group, setting, workload, timer.cluster)
    is_gathered_again = regathers(setting, is_glue=is_glue)
    copy_f, copy_b, copy_once = _copy_times(group, setting, workload, timer, is_gathered_again)
    return GroupPrice(
        gather_s=comm.gather_s,
        again_s=(comm.gather_s if is_gathered_again else 0.0) + comm.reduce_s,
        once_gather_s=comm.once_gather_s,
        once_reduce_s=comm.once_reduce_s,
        copy_forward_s=copy_f,
        copy_backward_s=copy_b,
        copy_once_s=copy_once,
        optimizer_s=_optimizer_s(group, setting, workload, timer),
        hooks_s=_hooks_s(group, setting, workload, timer.cluster),
    )


def call_price(
    work: BlockWork,
    zero: GroupPrice,
    setting: Setting,
    workload: Workload,
    timer: Timer,
    split_s: float = 0.0,
    ties_s: float = 0.0,
) -> BlockPrice:
    """Return the seconds of a call of a block.

    Args:
        work: of the block as it is decided.
        zero: what its parameters add.
        setting: degrees and sizes.
        workload: optimizer, precision and engine.
        timer: of the tensor-parallel degree.
        split_s: what the host takes because the backward is split.
        ties_s: sums of gradients over stages, once a step.
    """
    seconds = call_seconds(work, zero, setting, workload, timer.cluster, split_s, ties_s)
    has_buffer = workload.engine.has_gradient_buffer
    summed_s = work.summed_s if has_buffer else 0.0
    tensor_s = work.comm_forward_s + work.comm_backward_s + work.summed_s - summed_s
    host_s = (seconds.host_forward_s, seconds.host_backward_s)
    context_s = work.layout.context_s
    return BlockPrice(
        forward_s=seconds.forward_s,
        backward_s=seconds.backward_s,
        once_s=seconds.once_s,
        by_category={
            "compute": work.compute_forward_s + work.compute_backward_s + host_s[0] + host_s[1],
            "recompute": work.redo_s,
            **({"offload": 2 * work.away_s} if work.away_s else {}),
            **({"context_parallel": context_s} if context_s else {}),
            "tensor_parallel": max(0.0, tensor_s - context_s - work.layout.exchange_s),
            **({"expert_parallel": work.layout.exchange_s} if work.layout.exchange_s else {}),
            "zero": seconds.zero_s,
        },
        once_by_category={
            "zero": seconds.once_zero_s,
            "optimizer": zero.optimizer_s,
            "tensor_parallel": summed_s,
            "pipeline": ties_s,
        },
    )


def call_seconds(
    work: Any,
    zero: GroupPrice,
    setting: Setting,
    workload: Workload,
    cluster: Cluster,
    split_s: Any = 0.0,
    ties_s: Any = 0.0,
    *,
    extremes: tuple[Extreme, Extreme] = (max, min),
) -> CallSeconds:
    """Return the seconds of a call of a block, or of each decision of a table.

    Args:
        work, zero, setting, workload, split_s, ties_s: as in `call_price`; a `DecisionTable` in
            place of the work of a block, and an array [decision] for each other number of it.
        cluster: the devices.
        extremes: the larger and the smaller of two numbers; of two arrays, where these are.
    """
    most, _ = extremes
    forward, backward = work.forward_s, work.backward_s
    # Gradients of whole parameters that see slices of tokens: summed once into a buffer.
    summed_s = work.summed_s if workload.engine.has_gradient_buffer else 0.0
    backward = backward + (work.summed_s - summed_s)
    once_zero_s = zero.once_gather_s + zero.once_reduce_s
    exposed_f, exposed_b = zero.gather_s, zero.again_s
    if overlaps(setting, cluster):
        slowed = interference(data_parallel_link(setting, cluster))

        def exposed(communication_s: Any, compute_s: Any) -> Any:
            return exposed_s(communication_s, compute_s, slowed, extremes=extremes)

        exposed_f, exposed_b = exposed(zero.gather_s, forward), exposed(zero.again_s, backward)
        if workload.engine.overlaps_reduction:
            once_zero_s = exposed(zero.once_gather_s, forward)
            once_zero_s = once_zero_s + exposed(zero.once_reduce_s, backward)
    exposed_f, exposed_b = exposed_f + zero.copy_forward_s, exposed_b + zero.copy_backward_s
    host_f, host_b = _host_beside(work, zero.hooks_s, cluster, split_s, most)
    forward, backward = forward + host_f, backward + host_b
    once_zero_s = once_zero_s + zero.copy_once_s
    return CallSeconds(
        forward_s=forward + exposed_f,
        backward_s=backward + exposed_b,
        once_s=once_zero_s + zero.optimizer_s + summed_s + ties_s,
        host_forward_s=host_f,
        host_backward_s=host_b,
        zero_s=exposed_f + exposed_b,
        once_zero_s=once_zero_s,
    )


def _copy_times(
    group: GroupBytes, setting: Setting, workload: Workload, timer: Timer, is_gathered_again: bool
) -> tuple[float, float, float]:
    """Return seconds around collectives: forward, backward, once a step."""
    gather, reduce = _around_collectives(group, setting, workload, timer)
    if setting.zero_stage == 3:
        return gather, gather * is_gathered_again + reduce, 0.0
    if setting.zero_stage == 2:
        return 0.0, reduce, gather
    return 0.0, 0.0, gather + reduce


def _around_collectives(
    group: GroupBytes, setting: Setting, workload: Workload, timer: Timer
) -> tuple[float, float]:
    """Return seconds of copies and of the host around one gather and one reduction."""
    gather, reduce = map(timer.memory_s, copy_bytes(group, setting, workload))
    if is_wrapped(group, setting, workload):
        gather, reduce = gather + timer.host.gather, reduce + timer.host.reduce
    return gather, reduce


def host_seconds(
    work: BlockWork,
    group: GroupBytes,
    setting: Setting,
    workload: Workload,
    cluster: Cluster,
    split_s: float = 0.0,
) -> tuple[float, float]:
    """Return seconds that the host adds to a block's forward and to its backward.

    What a split takes, and hooks of FSDP, where kernels run on the host; ops have theirs in their
    own times. A host beside the device adds what it takes longer than the device: a step that is
    bound by launches lasts as long as they do.
    """
    return _host_beside(work, _hooks_s(group, setting, workload, cluster), cluster, split_s)


def _hooks_s(group: GroupBytes, setting: Setting, workload: Workload, cluster: Cluster) -> float:
    return is_wrapped(group, setting, workload) * cluster.device.host.sharded_block


def _host_beside(
    work: Any, hooks_s: float, cluster: Cluster, split_s: Any, most: Extreme = max
) -> tuple[Any, Any]:
    if not overlaps_communication(cluster):
        return hooks_s / 2, hooks_s / 2 + split_s
    forward_s, backward_s = (
        work.host_forward_s + hooks_s / 2,
        work.host_backward_s + hooks_s / 2 + split_s,
    )
    return most(0.0, forward_s - work.forward_s), most(0.0, backward_s - work.backward_s)


def split_seconds(work: BlockWork, nodes_below: float, cluster: Cluster) -> tuple[float, float]:
    """Return seconds of the host for a split of a block's backward: to the inputs, and later.

    Args:
        work: of the block.
        nodes_below: nodes of the stage's graph between its inputs and the block.
        cluster: whose host it is.
    """
    op_s, deferred = cluster.device.host.op_backward, work.deferred
    again = _SPLIT_GROUP + _SPLIT_BELOW * nodes_below
    return op_s * _SPLIT_NODE * deferred.nodes, op_s * again * deferred.groups


def zero_seconds(
    group: GroupBytes, setting: Setting, workload: Workload, timer: Timer
) -> tuple[float, float]:
    """Return seconds of one gather of a group's parameters and one reduction of its gradients.

    Copies around them included. Stage 0 never gathers and all-reduces; the others
    reduce-scatter.
    """
    comm = data_parallel_times(group, setting, workload, timer.cluster)
    gather, reduce = _around_collectives(group, setting, workload, timer)
    return (
        comm.gather_s + comm.once_gather_s + gather,
        comm.reduce_s + comm.once_reduce_s + reduce,
    )


def overlaps(setting: Setting, cluster: Cluster) -> bool:
    """Return whether gathers and reductions run beside the computation.

    FSDP over one device copies its parameters in on the stream that computes.
    """
    return overlaps_communication(cluster) and (setting.dp > 1 or setting.offload == "none")


def _optimizer_s(group: GroupBytes, setting: Setting, workload: Workload, timer: Timer) -> float:
    traffic = optimizer_bytes(group, setting, workload)
    if traffic == 0:
        return 0.0
    cluster, device = timer.cluster, timer.device
    kernels_s = timer.tally.add(device.optimizer_time_s(traffic))
    launches_s = group.trained_tensors * device.host.optimizer_tensor
    is_beside = overlaps_communication(cluster)
    device_s = max(kernels_s, launches_s) if is_beside else kernels_s + launches_s
    # Kernels are launched by the same host: a step there is never faster than their launches.
    is_offloaded = setting.offload != "none"
    return max(device_s, host_optimizer_s(traffic, cluster)) if is_offloaded else device_s
