"""Equations of a step: data-parallel communication, its overlap, the optimizer, the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.cluster import Cluster
from autoplan.meshes import stride_of
from autoplan.offload import copy_in_s, copy_out_s
from autoplan.profiles.link import LinkProfile, broadcast_time_s
from autoplan.resident import REDUCED_TOGETHER_BYTES, shards_of, uses_fsdp
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes

__all__ = [
    "INTERFERENCE",
    "DataParallelTimes",
    "copy_bytes",
    "data_parallel_link",
    "data_parallel_times",
    "exposed_s",
    "interference",
    "is_wrapped",
    "optimizer_bytes",
    "pipeline_step_s",
    "regathers",
    "slowdown_s",
    "tie_s",
    "transfer_s",
]

# Kernels and collectives that run at once each take longer by this factor, unless measured.
# Source: Hetu-Galvatron, hardware_configs/overlap_coefficient.json (1.1256), GPU not stated.
INTERFERENCE = 1.1256


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelTimes:
    """Seconds of data-parallel collectives of a group of parameters.

    Attributes:
        gather_s: of parameters, per micro-batch.
        reduce_s: of gradients, per micro-batch.
        once_gather_s, once_reduce_s: once a step.
    """

    gather_s: float = 0.0
    reduce_s: float = 0.0
    once_gather_s: float = 0.0
    once_reduce_s: float = 0.0


def data_parallel_times(
    group: GroupBytes, setting: Setting, workload: Workload, cluster: Cluster
) -> DataParallelTimes:
    """Return the seconds of gathers and reductions.

    Stage 3 gathers (once or twice, see `regathers`) and reduce-scatters for every micro-batch,
    stage 2 gathers once a step and reduce-scatters for every micro-batch, stage 1 does both once a
    step; stage 0 all-reduces once a step, large parameters alone and small ones together, with
    those of other groups (`sharders.GradientReducer`), or all in one buffer (Rajbhandari et al.
    2020, section 7; docs/design/memory-of-fsdp.md). Gradients are reduced in float32 under mixed
    precision unless the engine says otherwise. Shards on the host are copied from and to it.
    """
    if group.gathered == 0:
        return DataParallelTimes()
    if group.experts is not None:
        rest, experts = group.parts
        return _added(
            data_parallel_times(rest, setting, workload, cluster),
            _expert_times(experts, setting, workload, cluster),
        )
    if setting.dp == 1:
        return DataParallelTimes(
            gather_s=copy_in_s(group, setting, cluster),
            reduce_s=copy_out_s(group, setting, cluster),
        )
    reduced = group.trained if workload.engine.is_gradient_wide else group.gathered_grads
    if setting.zero_stage == 0:
        link = cluster.link_for(setting.dp, stride_of("dp", setting))
        size = float(reduced)
        if not workload.engine.has_gradient_buffer and group.trained_tensors:
            size = max(reduced / group.trained_tensors, REDUCED_TOGETHER_BYTES)
        share = reduced / size if size else 0.0
        reduce_s = share * link.collective_time_s("all_reduce", size, setting.dp)
        return DataParallelTimes(once_reduce_s=reduce_s)
    link, degree = data_parallel_link(setting, cluster), setting.dp_shard
    if setting.zero_stage == 1 and workload.engine.owns_whole_tensors:
        return _whole_tensor_times(group, reduced, setting, cluster)
    gather_s = link.collective_time_s("all_gather", group.gathered, degree)
    reduce_s = link.collective_time_s("reduce_scatter", reduced, degree)
    sum_s = _replicas_s(reduced, setting, cluster)
    if setting.zero_stage == 1:
        return DataParallelTimes(once_gather_s=gather_s, once_reduce_s=reduce_s + sum_s)
    is_summed_once = setting.pp == 1
    found = DataParallelTimes(
        reduce_s=reduce_s + (0.0 if is_summed_once else sum_s),
        once_reduce_s=sum_s if is_summed_once else 0.0,
    )
    if setting.zero_stage == 2:
        return replace(found, once_gather_s=gather_s)
    return replace(
        found,
        gather_s=gather_s + copy_in_s(group, setting, cluster),
        reduce_s=found.reduce_s + copy_out_s(group, setting, cluster),
    )


def _added(one: DataParallelTimes, other: DataParallelTimes) -> DataParallelTimes:
    return DataParallelTimes(
        gather_s=one.gather_s + other.gather_s,
        reduce_s=one.reduce_s + other.reduce_s,
        once_gather_s=one.once_gather_s + other.once_gather_s,
        once_reduce_s=one.once_reduce_s + other.once_reduce_s,
    )


def _expert_times(
    group: GroupBytes, setting: Setting, workload: Workload, cluster: Cluster
) -> DataParallelTimes:
    """Return the times of experts, over the ranks that hold the same ones; ZeRO 0 or 1."""
    copies = group.copies
    if copies == 1:
        return DataParallelTimes()
    reduced = group.trained if workload.engine.is_gradient_wide else group.gathered_grads
    link = cluster.link_for(copies, setting.dp * setting.tp // copies)
    if setting.zero_stage == 0:
        return DataParallelTimes(
            once_reduce_s=link.collective_time_s("all_reduce", reduced, copies)
        )
    return DataParallelTimes(
        once_gather_s=link.collective_time_s("all_gather", group.gathered, copies),
        once_reduce_s=link.collective_time_s("reduce_scatter", reduced, copies),
    )


def _whole_tensor_times(
    group: GroupBytes, reduced: int, setting: Setting, cluster: Cluster
) -> DataParallelTimes:
    """Return the times of ZeRO-1 whose ranks own whole tensors (`Engine.owns_whole_tensors`)."""
    everywhere = cluster.link_for(setting.dp, stride_of("dp", setting))
    count = max(1, group.trained_tensors)
    one_s = broadcast_time_s(
        group.gathered / count, setting.dp_shard, data_parallel_link(setting, cluster)
    )
    return DataParallelTimes(
        once_gather_s=count * one_s,
        once_reduce_s=everywhere.collective_time_s("all_reduce", reduced, setting.dp),
    )


def data_parallel_link(setting: Setting, cluster: Cluster) -> LinkProfile:
    """Return the link of ZeRO's gathers and reduce-scatters: over one replica's shards."""
    return cluster.link_for(setting.dp_shard, stride_of("dp", setting))


def _replicas_s(reduced: int, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds in which a rank's shard of gradients is summed over replicas.

    Hybrid sharding: an all-reduce over ranks that hold the same shard (Zhao et al. 2023, PyTorch
    FSDP, section 3.2.2), after each reduce-scatter under a pipeline, otherwise after the last.
    """
    if setting.dp_replicate == 1:
        return 0.0
    stride = stride_of("dp", setting) * setting.dp_shard
    link = cluster.link_for(setting.dp_replicate, stride)
    nbytes = -(-reduced // setting.dp_shard)
    return link.collective_time_s("all_reduce", nbytes, setting.dp_replicate)


def regathers(setting: Setting, *, is_glue: bool) -> bool:
    """Return whether ZeRO 3 gathers a block's parameters again for its backward.

    Those of glue are the group of FSDP's root, which stays from forward to backward unless the
    schedule of a pipeline runs other micro-batches in between (`sharders.shard`).
    """
    return setting.zero_stage == 3 and (setting.pp > 1 or not is_glue)


def copy_bytes(group: GroupBytes, setting: Setting, workload: Workload) -> tuple[float, float]:
    """Return bytes that copies around collectives read and write: per gather, per reduction.

    These kernels take the device from the computation; see `Engine` for which software has them.
    """
    if setting.dp == 1 or setting.zero_stage == 0 or group.gathered == 0:
        return 0.0, 0.0
    engine = workload.engine
    reduced = group.trained if engine.is_gradient_wide else group.gathered_grads
    gather = 2 * group.gathered * engine.copies_gathered
    reduce = (group.gathered_grads + reduced) * engine.copies_reduced
    if not engine.copies_gathered and reduced == group.gathered_grads:
        reduce = 0  # nothing to cast, and a flat gradient needs no copy
    return float(gather), float(reduce + 2 * reduced * engine.divides_reduced)


def interference(link: LinkProfile) -> float:
    """Return by how much kernels and a link's collectives slow each other: measured, if it was."""
    return INTERFERENCE if link.interference is None else link.interference


def exposed_s(communication_s: float, compute_s: float, slowed: float = INTERFERENCE) -> float:
    """Return by how much communication beside compute makes the compute longer.

    Both slow down by `slowed` while they run at once; what is left of the longer one runs alone
    (Miao et al. 2022, Galvatron, section 4.1).
    """
    longest_s = max(communication_s, compute_s)
    return longest_s + slowdown_s(communication_s, compute_s, slowed) - compute_s


def slowdown_s(communication_s: float, compute_s: float, slowed: float = INTERFERENCE) -> float:
    """Return by how much each of two pieces of work is longer because they run at once."""
    return (slowed - 1) * min(communication_s, compute_s)


def is_wrapped(group: GroupBytes, setting: Setting, workload: Workload) -> bool:
    """Return whether FSDP gathers a block's parameters over data-parallel ranks by its hooks."""
    is_mixed = workload.mixed_precision != "none"
    has_hooks = uses_fsdp(setting, is_mixed) and not workload.engine.has_gradient_buffer
    return has_hooks and setting.dp > 1 and group.gathered > 0


def optimizer_bytes(group: GroupBytes, setting: Setting, workload: Workload) -> float:
    """Return bytes read and written by a rank's share of an optimizer step.

    With a gradient buffer, mixed precision also writes parameters in the dtype of the computation,
    and gradients are read once more for their norm (Megatron-LM, `clip_grads.py`).
    """
    if group.experts is not None:
        return sum(optimizer_bytes(part, setting, workload) for part in group.parts)
    shards = shards_of(group, setting)
    traffic = group.trained * workload.optimizer.traffic_bytes_per_byte
    if workload.engine.has_gradient_buffer:
        grads = group.trained if workload.engine.is_gradient_wide else group.gathered_grads
        traffic += group.gathered_grads + grads
    return traffic / shards


def transfer_s(
    nbytes: int,
    setting: Setting,
    workload: Workload,
    cluster: Cluster,
    *,
    stage: int | None = None,
    is_sliced: bool = False,
) -> float:
    """Return the seconds of sending one micro-batch's activations over a cut, one way.

    Args:
        nbytes: of the whole activation.
        setting: degrees.
        workload: its engine may send a slice per tensor-parallel rank and gather it on the other
            side (Narayanan et al. 2021, section 4.1).
        cluster: the devices.
        stage: that sends forward; None: the one whose sends take the longest way.
        is_sliced: each rank holds a slice only (sequence parallelism).
    """
    link = cluster.link_between_stages(setting, stage)
    if not is_sliced and not workload.engine.sends_slices:
        return link.collective_time_s("send", nbytes, 2)
    seconds = link.collective_time_s("send", -(-nbytes // setting.tp), 2)
    if not is_sliced and setting.tp > 1:
        seconds += cluster.link_for(setting.tp, 1).collective_time_s(
            "all_gather", nbytes, setting.tp
        )
    return seconds


def tie_s(
    nbytes: int, num_calls: int, setting: Setting, workload: Workload, cluster: Cluster
) -> float:
    """Return a call's share of the seconds in which a gradient is summed over stages, once a step.

    Of a parameter that several calls have, each on a stage of its own as far as there are stages:
    an all-reduce between ranks of the pipeline, of what a rank holds of the gradient.

    Args:
        nbytes: of the parameter on a rank, before ZeRO shards it, in the dtype of the trace.
        num_calls: that have it.
        setting: degrees.
        workload: its engine may sum before data parallelism has sharded gradients.
        cluster: the devices.
    """
    num_ranks = min(setting.pp, num_calls)
    if num_ranks < 2:
        return 0.0
    shards = 1 if workload.engine.has_gradient_buffer else setting.shards
    held = nbytes * workload.parameter_bytes_per_traced_byte / shards
    link = cluster.link_for(setting.pp, stride_of("pp", setting))
    return link.collective_time_s("all_reduce", held, num_ranks) * num_ranks / num_calls


def pipeline_step_s(
    rank_s: Sequence[float], setting: Setting, stage_s: Sequence[float] = ()
) -> float:
    """Return the seconds of all forwards and backwards of a step, none of them split.

    m micro-batches at the pace of the slowest rank, and once through the others; with v stages a
    rank only a v-th of that is waited for (Narayanan et al. 2021, section 2.2). All ranks run their
    first stages at the same time, then their second and so on, so it is the slowest of each that
    sets the pace. What a split takes off is in `split_steps`.

    Args:
        rank_s: per rank, forward and backward of one micro-batch.
        setting: of the pipeline.
        stage_s: the same per stage; empty: a rank's stages are alike.
    """
    slowest = max(rank_s)
    others = sum(rank_s) - slowest
    if stage_s:
        pp = setting.pp
        slowest = sum(max(stage_s[first : first + pp]) for first in range(0, len(stage_s), pp))
    return setting.num_microbatches * slowest + others / setting.virtual_stages
