"""Cluster: how many devices there are, what each is, and which link a group of ranks uses.

Ranks are numbered node by node: rank r is on node r // gpus_per_node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autoplan import codec
from autoplan.meshes import HasDegrees, crosses_nodes, runs_stage, stride_of
from autoplan.nodes import NODES
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.units import format_bytes, parse_bytes

__all__ = ["Cluster", "NodeGroup"]

_FORMS = (
    "write '4x8:a100_sxm_80gb' (nodes x GPUs per node : profile), '8:h100', '16:dgx_h100' (nodes : "
    "preset), '2x8:h100 + 1x8:a100' (nodes of several types, the fastest first), or a YAML file"
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
            Between nodes the link is the same for all; inside theirs it is what their profiles say.
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
                (one node), several of these joined by `+`, or a path ending in `.yaml` or `.yml`.
                PROFILE is a name or alias of the catalog or a path ending in `.json`; a PRESET is a
                kind of node of `autoplan.nodes.NODES`.

                Keys of the file are those of `autoplan.cluster_files`.

        Raises:
            ValueError: if the text or a key of the file is wrong; says what is allowed.
            ProfileError: if there is no such profile.
        """
        text = str(text)
        if text.endswith((".yaml", ".yml")):
            from autoplan.cluster_files import read_cluster

            return read_cluster(Path(text))
        if "+" in text:
            return _joined([cls.parse(part) for part in text.split("+")])
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

    def with_slower(self, slower: Sequence[NodeGroup]) -> Cluster:
        """Return the cluster with more nodes, of other devices, each with as many as these.

        Between nodes the slowest link of all counts.

        Raises:
            ValueError: a device is faster than those of the first nodes.
        """
        links = [self.inter, *(_network_of(group.device, self) for group in slower)]
        return replace(
            self,
            num_nodes=self.num_nodes + sum(group.num_nodes for group in slower),
            inter=min(links, key=lambda link: link.bytes_per_s),
            slower=(*self.slower, *slower),
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

        Ranks of a stage wait for each other and hold as much. So where they are of several types
        they count as the slowest, with the memory of the smallest.
        """
        return _of_types(self, self._types_of_stage(mesh, stage)) if self.slower else self

    def of_type(self, index: int) -> Cluster:
        """Return the cluster as if all devices were of the type of `groups[index]`."""
        device = self.groups[index].device
        intra = self.intra if index == 0 or device.intra is None else device.intra
        return replace(self, device=device, intra=intra, slower=())

    def _types_of_stage(self, mesh: HasDegrees, stage: int) -> tuple[int, ...]:
        """Return which types have ranks of a stage."""
        found, start = [], 0
        for index, group in enumerate(self.groups):
            ranks = range(start, start + group.num_nodes * self.gpus_per_node)
            start = ranks.stop
            if runs_stage(ranks, stage, mesh):
                found.append(index)
        return tuple(found)

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
        if not crosses_nodes(self.gpus_per_node, self.world_size, stride, mesh.pp, stage):
            return self.intra
        return _link_for(self, 2, self.gpus_per_node)


def _joined(parts: Sequence[Cluster]) -> Cluster:
    """Return one cluster of the nodes of several, the fastest first."""
    first, *others = parts
    for other in others:
        if other.gpus_per_node != first.gpus_per_node:
            raise ValueError(
                f"nodes of {first.gpus_per_node} and of {other.gpus_per_node} devices cannot be "
                "joined: every node must have as many"
            )
    linked = [replace(part.device, intra=part.intra, inter=part.inter) for part in others]
    groups = [
        NodeGroup(num_nodes=part.num_nodes, device=device)
        for part, device in zip(others, linked, strict=True)
    ]
    try:
        return first.with_slower(groups)
    except ValueError as error:
        fastest = sorted(parts, key=lambda part: -max(part.device.peak_flops_per_s.values()))
        joined = " + ".join(map(str, fastest))
        raise ValueError(f"{error}: perhaps '{joined}'; ranks are numbered in this order") from None


def _network_of(device: DeviceProfile, cluster: Cluster) -> LinkProfile:
    return cluster.inter if device.inter is None else device.inter


@lru_cache(maxsize=256)
def _of_types(cluster: Cluster, types: tuple[int, ...]) -> Cluster:
    """Return a cluster as if all devices were as slow and as small as the least of some types."""
    own = [cluster.of_type(index) for index in types]
    dtypes = set.intersection(*(set(one.device.peak_flops_per_s) for one in own))

    def speed(one: Cluster) -> tuple[float, float]:
        fastest = max((one.device.peak_flops_per_s[dtype] for dtype in dtypes), default=0.0)
        return fastest, one.device.memory_bandwidth_bytes_per_s

    slowest, smallest = min(own, key=speed), min(own, key=lambda one: one.capacity_bytes)
    intra = min((one.intra for one in own), key=lambda link: link.bytes_per_s)
    if slowest.capacity_bytes == smallest.capacity_bytes:
        return replace(slowest, intra=intra)
    return replace(
        slowest,
        intra=intra,
        device_memory_bytes=smallest.total_bytes,
        reserve_bytes=smallest.reserved_bytes,
    )


def _check_slower(group: NodeGroup, device: DeviceProfile) -> None:
    if group.num_nodes < 1:
        raise ValueError(f"slower.num_nodes: must be at least 1, got {group.num_nodes}")
    shared = device.peak_flops_per_s.keys() & group.device.peak_flops_per_s.keys()
    faster = [d for d in shared if group.device.peak_flops_per_s[d] > device.peak_flops_per_s[d]]
    if not shared or len(faster) == len(shared):
        raise ValueError(
            f"{group.device.name} is faster than {device.name} or shares no dtype with it: name "
            "the nodes with the fastest devices first"
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
