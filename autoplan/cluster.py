"""Cluster: how many devices there are, what each is, and which link a group of ranks uses.

Ranks are numbered node by node: rank r is on node r // gpus_per_node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan import codec
from autoplan.meshes import HasDegrees, stride_of
from autoplan.nodes import NODES
from autoplan.profiles.catalog import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.units import format_bytes, parse_bytes

__all__ = ["Cluster"]

_FORMS = (
    "write '4x8:a100_sxm_80gb' (nodes x GPUs per node : profile), '8:h100', '16:dgx_h100' (nodes : "
    "preset), or a YAML file"
)
_YAML_KEYS = (
    "num_nodes",
    "node",
    "gpus_per_node",
    "device",
    "device_memory",
    "reserve",
    "intra",
    "inter",
)
_LINK_KEYS = ("latency_s", "bytes_per_s", "setup_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        num_nodes: nodes, at least 1.
        gpus_per_node: devices in each node, at least 1.
        device: the profile of every device.
        intra: link between two devices of a node.
        inter: link of one device to another node.
        device_memory_bytes: memory to plan with instead of the profile's; None: the profile's.
        reserve_bytes: reserve to plan with instead of the profile's; None: the profile's.
    """

    num_nodes: int
    gpus_per_node: int
    device: DeviceProfile
    intra: LinkProfile
    inter: LinkProfile
    device_memory_bytes: int | None = None
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
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

                Keys of the file: `num_nodes` (default 1), and `node` (a preset) or `gpus_per_node`
                and `device` (PROFILE), and optionally `device_memory` and `reserve` (bytes, or text
                such as `40GiB`), `intra` and `inter` (each `latency_s`, `bytes_per_s` and
                optionally `setup_s`).

        Raises:
            ValueError: if the text or a key of the file is wrong; says what is allowed.
            ProfileError: if there is no such profile.
        """
        text = str(text)
        if text.endswith((".yaml", ".yml")):
            return _from_yaml(Path(text))
        preset = re.fullmatch(r"\s*(?:(\d+)\s*:)?\s*(\S+)\s*", text)
        if preset is not None and preset.group(2) in NODES:
            return _of_nodes(preset.group(2), int(preset.group(1) or 1))
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

        Raises:
            ValueError: if the profile has no link at all.
        """
        intra, inter = device.intra, device.inter
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
        return f"{self.num_nodes}x{self.gpus_per_node}:{self.device.name}"

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
        ring has the ports of all its ranks in a node together, no faster than `intra`, and the
        latency is the mean over its hops.

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


def _from_yaml(path: Path) -> Cluster:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the cluster file {path}: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must be a mapping with the keys {', '.join(_YAML_KEYS)}")
    needed = ("node",) if "node" in document else ("gpus_per_node", "device")
    _check_keys(str(path), document, _YAML_KEYS, needed)
    num_nodes = _count(path, document, "num_nodes", 1)
    gpus, device = _node_of(path, document)
    links = {level: _link(path, document, level) for level in ("intra", "inter")}
    try:
        device = replace(
            device, intra=links["intra"] or device.intra, inter=links["inter"] or device.inter
        )
        cluster = Cluster.from_device(device, num_nodes=num_nodes, gpus_per_node=gpus)
        return replace(
            cluster,
            device_memory_bytes=_size(document, "device_memory"),
            reserve_bytes=_size(document, "reserve"),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _node_of(path: Path, document: Mapping[str, Any]) -> tuple[int, DeviceProfile]:
    """Return devices per node and their profile, from `node` or from the two keys themselves."""
    if "node" in document:
        name = document["node"]
        if name not in NODES:
            raise ValueError(f"{path}: node: must be one of {', '.join(NODES)}, got {name!r}")
        if "device" in document:
            raise ValueError(f"{path}: device: the node {name} has one already, leave it out")
        preset = _of_nodes(name, 1)
        return _count(path, document, "gpus_per_node", preset.gpus_per_node), replace(
            preset.device, intra=preset.intra, inter=preset.inter
        )
    if not isinstance(document["device"], str):
        raise ValueError(f"{path}: device: must be the name of a profile")
    return _count(path, document, "gpus_per_node", 1), load_profile(document["device"])


def _of_nodes(name: str, num_nodes: int) -> Cluster:
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
    return Cluster.from_device(
        replace(device, inter=inter), num_nodes=num_nodes, gpus_per_node=node.gpus
    )


def _check_keys(
    where: str, mapping: Mapping[Any, Any], allowed: tuple[str, ...], needed: tuple[str, ...]
) -> None:
    for key in mapping:
        if key not in allowed:
            raise ValueError(f"{where}: {key}: unknown key; allowed are {', '.join(allowed)}")
    for key in needed:
        if key not in mapping:
            raise ValueError(f"{where}: {key}: missing key")


def _count(path: Path, document: Mapping[str, Any], key: str, default: int) -> int:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {key}: must be a whole number of at least 1, got {value!r}")
    return value


def _size(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    if value is None or value == 0:
        return None if value is None else 0
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{key}: must be bytes or text such as 40GiB, got {value!r}")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _link(path: Path, document: Mapping[str, Any], level: str) -> LinkProfile | None:
    if level not in document:
        return None
    mapping = document[level]
    if not isinstance(mapping, dict):
        raise ValueError(f"{path}: {level}: must be a mapping with {', '.join(_LINK_KEYS)}")
    _check_keys(f"{path}: {level}", mapping, _LINK_KEYS, ("latency_s", "bytes_per_s"))
    numbers = {}
    for key, value in mapping.items():
        try:
            numbers[key] = float(value)  # YAML 1.1 reads 25e9 as text
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {level}.{key}: must be a number, got {value!r}") from None
    try:
        return LinkProfile.from_numbers(
            name=f"{level}-node link of {path.name}",
            level="intra" if level == "intra" else "inter",
            source=f"given in {path.name}",
            **numbers,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {level}.{error}") from None
