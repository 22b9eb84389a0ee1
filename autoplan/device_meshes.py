"""The device mesh of a plan: its axes in the plan's order, dp in one piece or in two."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan import compat
from autoplan.meshes import HasDegrees

__all__ = ["axis_of", "make_device_mesh", "sharding_mesh"]

_SPLIT = ("dp_replicate", "dp_shard")


def make_device_mesh(mesh: HasDegrees, dp_replicate: int, device_type: str) -> DeviceMesh:
    """Return the mesh of all processes, with axes `pp`, `dp` and `tp`, outermost first in order.

    With replicas `dp` is two axes, `dp_replicate` and `dp_shard`; see `axis_of`.

    Args:
        mesh: degrees and their order.
        dp_replicate: replicas of what ZeRO shards; divides dp.
        device_type: such as `cuda`.
    """
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
    names: list[str] = []
    for name in reversed(mesh.axis_order.split("-")):
        names += _SPLIT if name == "dp" and dp_replicate > 1 else (name,)
    sizes |= {"dp_replicate": dp_replicate, "dp_shard": mesh.dp // dp_replicate}
    shape = tuple(sizes[name] for name in names)
    made = init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
    axis_of(made, "dp")  # all ranks make its groups now, in one order
    return made


def axis_of(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the axis `pp`, `dp` or `tp`; `dp` also where it is two axes."""
    if name == "dp" and set(_SPLIT) <= set(mesh.mesh_dim_names or ()):
        return compat.flatten_axes(mesh[_SPLIT], "dp")
    return mesh[name]


def sharding_mesh(mesh: DeviceMesh, dp_replicate: int) -> DeviceMesh:
    """Return the mesh that FSDP takes: `dp`, or replicas times shards (hybrid sharding)."""
    return mesh[_SPLIT] if dp_replicate > 1 else mesh["dp"]
