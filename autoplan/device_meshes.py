"""The device mesh of a plan: its axes in the plan's order, dp in one piece or in two."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan import compat
from autoplan.meshes import HasDegrees

__all__ = ["make_device_mesh", "sharding_mesh"]


def make_device_mesh(mesh: HasDegrees, dp_replicate: int, device_type: str) -> DeviceMesh:
    """Return the mesh of all processes, with axes `pp`, `dp` and `tp`, outermost first in order.

    With replicas `dp` is also two axes, `dp_replicate` and `dp_shard`.

    Args:
        mesh: degrees and their order.
        dp_replicate: replicas of what ZeRO shards; divides dp.
        device_type: such as `cuda`.
    """
    sizes = {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
    names: list[str] = []
    for name in reversed(mesh.axis_order.split("-")):
        names += ["dp_replicate", "dp_shard"] if name == "dp" and dp_replicate > 1 else [name]
    sizes |= {"dp_replicate": dp_replicate, "dp_shard": mesh.dp // dp_replicate}
    shape = tuple(sizes[name] for name in names)
    made = init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
    if dp_replicate > 1:
        compat.flatten_axes(made["dp_replicate", "dp_shard"], "dp")
    return made


def sharding_mesh(mesh: DeviceMesh, dp_replicate: int) -> DeviceMesh:
    """Return the mesh that FSDP takes: `dp`, or replicas times shards (hybrid sharding)."""
    return mesh["dp_replicate", "dp_shard"] if dp_replicate > 1 else mesh["dp"]
