"""Measure the links of a running cluster, as one rank of a torchrun job: `autoplan profile` in it.

Groups inside nodes give the link `intra`, groups over nodes the link `inter`: one rank of each
node, which has a network port of its own, and all ranks together, which share what a node has.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.errors import ProfileError
from autoplan.profiles.catalog import load_profile, save_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.here import find_device, profile_name
from autoplan.profiles.link import Level
from autoplan.profiles.measure import measure_device, measured_origin
from autoplan.profiles.measure_groups import (
    collective_rows,
    common_deadline,
    interference_ratio,
)
from autoplan.profiles.measure_hooks import hook_seconds
from autoplan.profiles.measure_links import link_of, tables_of
from autoplan.profiles.origin import Origin
from autoplan.profiles.tables import CollectiveTable

__all__ = ["Nodes", "groups_of", "is_under_torchrun", "profile_as_rank"]

WAIT_S = 600.0  # for rank 0, which measures the device first
DEVICE_SHARE = 0.5  # of the budget, where no file has measured the device yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where the ranks of a job are: node by node, equally many on each."""

    num_nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Nodes:
        """Return what torchrun says in the environment.

        Raises:
            ProfileError: the nodes have not equally many ranks.
        """
        world = int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_WORLD_SIZE", world))
        if world % local:
            raise ProfileError(
                f"{world} ranks with {local} on this node: start equally many on every node"
            )
        return cls(num_nodes=world // local, ranks_per_node=local)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Groups of one kind, which measure at the same time; rank 0 is in the first."""

    level: Level
    groups: tuple[tuple[int, ...], ...]
    ranks_per_node: int = 1


def is_under_torchrun() -> bool:
    """Return whether this process is one of several ranks of a job."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def groups_of(nodes: Nodes) -> tuple[_Kind, ...]:
    """Return the groups that are measured, in the order in which every rank makes them."""
    local = nodes.ranks_per_node
    starts = [node * local for node in range(nodes.num_nodes)]
    kinds = []
    degree = 2
    while degree <= local:
        groups = tuple(tuple(range(start, start + degree)) for start in starts)
        kinds.append(_Kind(level="intra", groups=groups))
        degree *= 2
    if nodes.num_nodes > 1:
        for count in sorted({2, nodes.num_nodes}):
            groups = tuple(
                tuple(start + place for start in starts[:count]) for place in range(local)
            )
            kinds.append(_Kind(level="inter", groups=groups))
        if local > 1:
            every = tuple(range(local * nodes.num_nodes))
            kinds.append(_Kind(level="inter", groups=(every,), ranks_per_node=local))
    return tuple(kinds)


def profile_as_rank(
    gpu: str,
    out: Path | None = None,
    *,
    budget_s: float = 20.0,
    progress: Callable[[str, float], None] = lambda message, fraction: None,
) -> Path | None:
    """Measure the device on rank 0 and the links on all ranks; every rank of the job calls it.

    Where the file has a profile of this device, only links are measured.

    Args:
        gpu, out, progress: as in `profile_command`.
        budget_s: seconds for all; of every kind of group a few points are measured in any case.

    Returns:
        The path of the file on rank 0, None on the others.

    Raises:
        ProfileError: the device is not there, or nodes have unequal numbers of ranks.
    """
    import torch
    import torch.distributed as dist

    begun_s = time.time()
    device = find_device(gpu)
    nodes = Nodes.of(os.environ)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=WAIT_S + 10 * budget_s))
    is_first = dist.get_rank() == 0
    path = out or Path(f"{profile_name(device, gpu)}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = None
    if is_first:
        known = load_profile(path) if path.exists() else None
        profile = known or measure_device(
            gpu, budget_s=DEVICE_SHARE * budget_s, with_links=False, progress=progress
        )
    dist.barrier()
    kinds = groups_of(nodes)
    host = hook_seconds(device, slice_s=budget_s / 50) if dist.get_world_size() == 2 else {}
    deadline = common_deadline(begun_s + budget_s, None, device)
    found: dict[Level, list[CollectiveTable]] = {}
    interference: dict[Level, float] = {}
    for number, kind in enumerate(kinds):
        progress(f"{kind.level} groups of {len(kind.groups[0])}", number / len(kinds))
        measured = _measured(kind, device, deadline.slice_s(len(kinds) - number))
        if measured is not None:
            curves, ratio = measured
            found.setdefault(kind.level, []).extend(curves)
            interference[kind.level] = ratio
    if profile is not None:
        origin = measured_origin(device)
        profile = _with_links(profile, found, interference, f"{profile.name} {backend}", origin)
        if host:
            profile = profile.with_measurements(host, "hooks", origin)
        save_profile(profile, path)
    dist.barrier()
    dist.destroy_process_group()
    return path if is_first else None


def _measured(
    kind: _Kind, device: Any, budget_s: float
) -> tuple[Sequence[CollectiveTable], float] | None:
    """Return curves and interference of this rank's group; None for a rank in no group."""
    import torch.distributed as dist

    made = [dist.new_group(list(ranks)) for ranks in kind.groups]
    rank = dist.get_rank()
    own = [g for g, ranks in zip(made, kind.groups, strict=True) if rank in ranks]
    result = None
    if own:
        deadline = common_deadline(time.time() + budget_s, own[0], device)
        ratio = interference_ratio(own[0], device)
        rows = collective_rows(own[0], device, deadline=deadline)
        result = tables_of(rows, len(kind.groups[0]), "collectives", kind.ranks_per_node), ratio
    dist.barrier()
    for group in own:
        dist.destroy_process_group(group)
    return result


def _with_links(
    profile: DeviceProfile,
    curves: Mapping[Level, Sequence[CollectiveTable]],
    interference: Mapping[Level, float],
    name: str,
    origin: Origin,
) -> DeviceProfile:
    for level, own in curves.items():
        link = link_of(
            own,
            name=f"{name} {level}",
            level=level,
            measured=origin,
            interference=interference[level],
        )
        profile = replace(profile, intra=link) if level == "intra" else replace(profile, inter=link)
    return profile
