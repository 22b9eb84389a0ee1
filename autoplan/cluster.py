"""Cluster: how many devices there are, what each is, and which link a group of ranks uses.

Ranks are numbered node by node: rank r is on node r // gpus_per_node.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autoplan import codec
from autoplan.meshes import HasDegrees, ranks_of_stage, stride_of
from autoplan.nodes import NODES
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.units import format_bytes, parse_bytes

__all__ = ["Cluster", "NodeGroup"]

_FORMS = (
    "write '4x8:a100_sxm_80gb' (nodes x GPUs per node : profile), '8:h100', '16:dgx_h100' (nodes : "
    "preset), or a YAML file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one type, with consecutive ranks."""

    num_nodes: int
    device: DeviceProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equally many devices; equal devices unless there are `slower` ones.

    Attributes:
        num_nodes: nodes, at least 1, slower ones included.
        gpus_per_node: devices in each node, at least 1.
        device: the profile of every device, or of those of the first nodes.
        intra: link between two devices of a node.
        inter: link of one device to another node.
        device_memory_bytes: memory to plan with instead of the profile's; None: the profile's.
        reserve_bytes: reserve to plan with instead of the profile's; None: the profile's.
        slower: the last nodes, where their devices are of other types, none faster than `device`.
            Links are the same for all.
    """

    num_nodes: int
    gpus_per_node: int
    device: DeviceProfile
    intra: LinkProfile
    inter: LinkProfile
    device_memory_bytes: int | None = None
    reserve_bytes: int | None = None
    slower: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        if sum(group.num_nodes for group in self.slower) >= self.num_nodes:
            raise ValueError(
                f"slower nodes are {sum(g.num_nodes for g in self.slower)} of {self.num_nodes}: "
                "at least one must be of the first type"
            )
        for group in self.slower:
            _check_slower(group, self.device)
        if self.device_memory_bytes is not None and self.device_memory_bytes <= 0:
            raise ValueError(
                f"device_memory_bytes: must be above 0, got {self.device_memory_bytes}"
            )
        if self.reserve_bytes is not None and self.reserve_bytes < 0:
            raise ValueError(f"reserve_bytes: must be at least 0, got {self.reserve_bytes}")
        for level in ("intra", "inter"):
            if getattr(self, level).level != level:
                raise ValueError(
                    f"{level}.level: must be {level!r}, got {getattr(self, level).level!r}"
                )
        if self.capacity_bytes <= 0:
            raise ValueError(
                f"nothing is left of {format_bytes(self.total_bytes)} device memory after a "
                f"reserve of {format_bytes(self.reserved_bytes)}: raise device_memory_bytes or "
                "lower reserve_bytes"
            )

    @classmethod
    def parse(cls, text: str | Path) -> Cluster:
        """Return the cluster that a short text or a YAML file describes.

        Args:
            text: `NODESxGPUS:PROFILE`, `GPUS:PROFILE` (one node), `NODES:PRESET`, a preset alone
                (one node), or a path ending in `.yaml` or `.yml`. PROFILE is a name or alias of the
                catalog or a path ending in `.json`; a PRESET is a kind of node of
                `autoplan.nodes.NODES`.

                Keys of the file are those of `autoplan.cluster_files`.

        Raises:
            ValueError: if the text or a key of the file is wrong; says what is allowed.
            ProfileError: if there is no such profile.
        """
        text = str(text)
        if text.endswith((".yaml", ".yml")):
            from autoplan.cluster_files import read_cluster

            return read_cluster(Path(text))
        preset = re.fullmatch(r"\s*(?:(\d+)\s*:)?\s*(\S+)\s*", text)
        if preset is not None and preset.group(2) in NODES:
            return cls.of_nodes(preset.group(2), int(preset.group(1) or 1))
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*:\s*(\S+)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a cluster: {_FORMS}")
        nodes, gpus, profile = match.groups()
        try:
            return cls.from_device(
                load_profile(profile), num_nodes=int(nodes or 1), gpus_per_node=int(gpus)
            )
        except ValueError as error:
            raise ValueError(f"{text!r} is not a cluster: {error}; {_FORMS}") from None

    @classmethod
    def from_device(
        cls, device: DeviceProfile, *, num_nodes: int = 1, gpus_per_node: int = 1
    ) -> Cluster:
        """Return a cluster with the links that the device's profile carries.

        A profile without network gets its intra-node link between nodes, and the other way round.
        One device alone needs neither.

        Raises:
            ValueError: if the profile has no link at all, and there are several devices.
        """
        intra, inter = device.intra, device.inter
        if intra is None and inter is None and num_nodes == gpus_per_node == 1:
            intra = LinkProfile.from_numbers(
                name="no link",
                level="intra",
                latency_s=0.0,
                bytes_per_s=1.0,
                source="one device has no peer: nothing is sent",
            )
        if intra is None and inter is None:
            raise ValueError(
                f"profile {device.name} has no links: give Cluster(intra=..., inter=...) or "
                "describe them in a YAML file"
            )
        return cls(
            num_nodes=num_nodes,
            gpus_per_node=gpus_per_node,
            device=device,
            intra=intra or replace(_existing(inter), level="intra"),
            inter=inter or replace(_existing(intra), level="inter"),
        )

    @classmethod
    def of_nodes(cls, name: str, num_nodes: int) -> Cluster:
        """Return so many nodes of a kind of `autoplan.nodes.NODES`."""
        node = NODES[name]
        device = load_profile(node.device)
        inter = device.inter
        if node.network_bytes_per_s is not None and inter is not None:
            inter = LinkProfile.from_numbers(
                name=f"{name} network",
                level="inter",
                latency_s=inter.latency_s,
                setup_s=inter.setup_s,
                bytes_per_s=node.network_bytes_per_s,
                source=node.source,
            )
        return cls.from_device(
            replace(device, inter=inter), num_nodes=num_nodes, gpus_per_node=node.gpus
        )

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Return a cluster from the text of `to_json`.

        Raises:
            ValueError: names the key that is unknown, missing or wrong.
        """
        return codec.loads(cls, text, "cluster")

    def to_json(self) -> str:
        """Return the cluster, profiles included, as JSON text."""
        return codec.dumps(self)

    def __str__(self) -> str:
        return " + ".join(
            f"{group.num_nodes}x{self.gpus_per_node}:{group.device.name}" for group in self.groups
        )

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """Return the nodes by type, in the order of their ranks."""
        first = self.num_nodes - sum(group.num_nodes for group in self.slower)
        return (NodeGroup(num_nodes=first, device=self.device), *self.slower)

    def on_stage(self, mesh: HasDegrees, stage: int) -> Cluster:
        """Return the cluster as a pipeline stage sees it: as if all devices were of its type.

        Raises:
            ValueError: its ranks are of several types; says which degrees would do.
        """
        if not self.slower:
            return self
        found = self._types_of_stage(mesh, stage)
        if len(found) > 1:
            sizes = " + ".join(str(g.num_nodes * self.gpus_per_node) for g in self.groups)
            raise ValueError(
                f"stage {stage} of dp={mesh.dp} tp={mesh.tp} pp={mesh.pp} would lie on "
                f"{' and '.join(self.groups[i].device.name for i in found)}: data and tensor "
                f"parallel ranks must be alike, so dp * tp must divide each of {sizes} devices, "
                "in the order tp-dp-pp"
            )
        return replace(self, device=self.groups[found[0]].device, slower=())

    def on_slowest(self) -> Cluster:
        """Return the cluster as if all its devices were of the last, slowest type."""
        return replace(self, device=self.groups[-1].device, slower=())

    def _types_of_stage(self, mesh: HasDegrees, stage: int) -> list[int]:
        ends: list[int] = []
        for group in self.groups:
            before = ends[-1] if ends else 0
            ends.append(before + group.num_nodes * self.gpus_per_node)
        ranks = ranks_of_stage(stage, mesh)
        return sorted({next(i for i, end in enumerate(ends) if rank < end) for rank in ranks})

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.num_nodes * self.gpus_per_node

    @property
    def is_cpu(self) -> bool:
        """Whether the ranks compute on a CPU, by the name of the profile."""
        return self.device.name.startswith("cpu")

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a plan may use on each device: memory minus reserve."""
        return self.total_bytes - self.reserved_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of memory of each device: Device_Memory."""
        own = self.device_memory_bytes
        return self.device.memory_bytes if own is None else own

    @property
    def reserved_bytes(self) -> int:
        """Bytes of each device that no tensor may use."""
        own = self.reserve_bytes
        return self.device.reserve_bytes if own is None else own

    def with_memory(self, device_memory: int | str, *, reserve_bytes: int | None = None) -> Cluster:
        """Return the same cluster with another memory per device.

        Args:
            device_memory: bytes, or text like `40GiB`.
            reserve_bytes: bytes of it that no tensor may use; None keeps the reserve.

        Raises:
            ValueError: if it is no size, or does not exceed the reserve.
        """
        changed = self if reserve_bytes is None else replace(self, reserve_bytes=reserve_bytes)
        return replace(changed, device_memory_bytes=parse_bytes(device_memory))

    def link_for(self, degree: int, stride: int = 1) -> LinkProfile:
        """Return the link that prices collectives of a mesh axis.

        The axis groups `degree` ranks, `stride` apart, in blocks of `degree * stride` ranks; the
        group that touches most nodes decides. A group inside a node has `intra`. A group over
        several nodes has a link made of both: a send has the `inter` bandwidth of one device, a
        ring has the ports of all its ranks in a node together, no faster than `intra` and no faster
        than its share of what rings over whole nodes were measured to reach, and the latency is
        the mean over its hops.

        Args:
            degree: ranks in a group, at least 1.
            stride: distance of neighbours in rank numbers, at least 1.

        Raises:
            ValueError: if a group does not fit into the cluster.
        """
        if degree < 1 or stride < 1:
            raise ValueError(f"degree and stride must be at least 1, got {degree} and {stride}")
        if degree * stride > self.world_size:
            raise ValueError(
                f"{degree} ranks {stride} apart need {degree * stride} ranks, the cluster "
                f"{self} has {self.world_size}"
            )
        return _link_for(self, degree, stride)

    def link_between_stages(self, mesh: HasDegrees, stage: int | None = None) -> LinkProfile:
        """Return the link that prices what a pipeline stage sends to the next.

        Args:
            mesh: degrees and the order of axes.
            stage: that sends forward; None: the one with the longest way, if any has it.
        """
        stride = stride_of("pp", mesh)
        if not _crosses(self.gpus_per_node, self.world_size, stride, mesh.pp, stage):
            return self.intra
        return _link_for(self, 2, self.gpus_per_node)


@lru_cache(maxsize=4096)
def _crosses(gpus: int, world: int, stride: int, pp: int, stage: int | None) -> bool:
    """Return whether some rank of a stage (of any, if None) and its peer of the next lie apart.

    The ranks `first` to `first + stride` of a stage send `stride` farther, over every border of
    nodes up to `first + 2 * stride`.
    """
    width = stride * pp
    stages = range(pp - 1) if stage is None else (stage,)
    starts = range(0, min(world, math.lcm(width, gpus)), width)
    return any(
        (start + s * stride) // gpus != (start + (s + 2) * stride - 1) // gpus
        for start in starts
        for s in stages
    )


def _check_slower(group: NodeGroup, device: DeviceProfile) -> None:
    if group.num_nodes < 1:
        raise ValueError(f"slower.num_nodes: must be at least 1, got {group.num_nodes}")
    shared = device.peak_flops_per_s.keys() & group.device.peak_flops_per_s.keys()
    faster = [d for d in shared if group.device.peak_flops_per_s[d] > device.peak_flops_per_s[d]]
    if not shared or len(faster) == len(shared):
        raise ValueError(
            f"{group.device.name} is faster than {device.name} or shares no dtype with it: name "
            "the nodes with the fastest devices first, in `device`"
        )


def _existing(link: LinkProfile | None) -> LinkProfile:
    assert link is not None
    return link


@lru_cache(maxsize=4096)
def _link_for(cluster: Cluster, degree: int, stride: int) -> LinkProfile:
    gpus = cluster.gpus_per_node
    if degree == 1 or cluster.num_nodes == 1 or gpus % (degree * stride) == 0:
        return cluster.intra
    ranks_per_node = max(1, gpus // stride)
    num_crossings = min(degree, math.ceil(degree / ranks_per_node))
    if num_crossings < 2:
        # A group that starts late in a node can straddle two of them.
        num_crossings, ranks_per_node = 2, 1
    intra, inter = cluster.intra, cluster.inter
    hops_s = num_crossings * inter.latency_s + (degree - num_crossings) * intra.latency_s
    depth_s = math.ceil(math.log2(num_crossings)) * inter.latency_s
    depth_s += (math.ceil(degree / num_crossings) - 1) * intra.latency_s
    ring = inter.bytes_per_s
    if ranks_per_node > 1:
        ring = min(ranks_per_node * inter.bytes_per_s, intra.bytes_per_s)
    origin = inter.origin_by_field["bytes_per_s"]
    together = inter.node_ring_bytes_per_s(num_crossings)
    if together is not None and together * ranks_per_node / gpus < ring:
        # All groups of an axis communicate at once, so each has its share of the ports.
        ring = together * ranks_per_node / gpus
        origin = inter.origin_by_field["node_rings"]
    return replace(
        inter,
        name=f"{inter.name}, {ranks_per_node} per node",
        latency_s=hops_s / degree,
        tree_latency_s=depth_s,
        ranks_per_node=ranks_per_node,
        ring_bytes_per_s=ring,
        ring_limit_bytes_per_s=intra.bytes_per_s,
        origin_by_field={**inter.origin_by_field, "ring_bytes_per_s": origin},
    )
