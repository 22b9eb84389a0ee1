"""What it costs to keep states, or what autograd saves, in host memory.

States are the shards of parameters, gradients and optimizer state. Every gather then first copies
the rank's shard to the device, every reduction copies its result back, and the optimizer steps on
the host (ZeRO-Offload, Ren et al. 2021; FSDP2's `CPUOffloadPolicy`).
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.cluster import Cluster
from autoplan.liveness import offloaded_bytes
from autoplan.local_blocks import LocalBlock
from autoplan.profiles.catalog import load_profile
from autoplan.settings import OFFLOADS, Setting, Workload
from autoplan.stage_costs import GroupBytes

__all__ = ["away_s", "check_offload", "copy_in_s", "copy_out_s", "host_bytes", "host_optimizer_s"]

# Two sockets of eight channels of DDR4-3200 a node: 2 * 8 * 25.6 GB/s.
# Source: datasheet of the AMD EPYC 7742, two of which are in a DGX A100.
HOST_BYTES_PER_S = 409.6e9


def check_offload(offload: Iterable[str] | str, cluster: Cluster) -> tuple[str, ...]:
    """Return what may be offloaded, from what a user gave.

    Raises:
        ValueError: there is no such part, or the devices are CPUs, which have no other memory.
    """
    wanted = (offload,) if isinstance(offload, str) else tuple(offload)
    unknown = [name for name in wanted if name not in OFFLOADS]
    if unknown:
        raise ValueError(f"offload={unknown[0]!r}; allowed are {', '.join(OFFLOADS)}")
    if wanted and cluster.is_cpu:
        raise ValueError(
            f"offload={wanted[0]!r} on {cluster}: a CPU computes in host memory already; leave "
            "offload out"
        )
    return wanted


def copy_in_s(group: GroupBytes, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of copying a rank's shard of the stored parameters to the device."""
    return _copy_s(group.stored, setting, cluster)


def copy_out_s(group: GroupBytes, setting: Setting, cluster: Cluster) -> float:
    """Return the seconds of copying a rank's shard of the gradients to the host."""
    return _copy_s(group.trained, setting, cluster)


def _copy_s(nbytes: int, setting: Setting, cluster: Cluster) -> float:
    if setting.offload == "none" or nbytes == 0:
        return 0.0
    device = cluster.device
    return device.launch_overhead_s + nbytes / setting.dp_shard / device.host_link_bytes_per_s


def away_s(local: LocalBlock, cluster: Cluster) -> float:
    """Return the seconds of copying what a block's forward saves to the host, one way.

    The copies run on the stream that computes (`autoplan.host_activations`), so nothing hides them.
    """
    device = cluster.device
    copies = sum(len(op.saved) + (op.internal_bytes > 0) for op in local.ops)
    seconds = copies * device.launch_overhead_s
    return seconds + offloaded_bytes(local) / device.host_link_bytes_per_s


def host_optimizer_s(traffic_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of a rank's optimizer step on the host.

    The ranks of a node share its memory bandwidth, of which torch's optimizers reach the share
    that they were measured to reach on a CPU (profile `cpu`).

    Args:
        traffic_bytes: read and written by the rank's step.
        cluster: the devices.
    """
    measured = load_profile("cpu")
    bandwidth = HOST_BYTES_PER_S / cluster.gpus_per_node
    slower = measured.memory_bandwidth_bytes_per_s / bandwidth
    return measured.optimizer_time_s(traffic_bytes * slower).time_s


def host_bytes(groups: Iterable[GroupBytes], setting: Setting, workload: Workload) -> int:
    """Return the bytes of host memory that a rank's shards of these groups take."""
    if setting.offload == "none":
        return 0
    states = 2 + workload.optimizer.state_bytes_per_byte
    total = sum(g.stored - g.trained + g.trained * states for g in groups)
    return -(-int(total) // setting.dp_shard)
