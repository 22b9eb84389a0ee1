"""How ranks are numbered over the axes of a mesh, and where stages and replicas lie.

An order names the axes from the innermost, whose neighbours have neighbouring ranks, to the
outermost. tp is always innermost. dp is dp_replicate times dp_shard, the shards inside.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, Protocol

__all__ = [
    "AXIS_ORDERS",
    "AxisOrder",
    "HasDegrees",
    "crosses_nodes",
    "ranks_of_stage",
    "runs_stage",
    "stage_of_rank",
    "stride_of",
]

AxisOrder = Literal["tp-dp-pp", "tp-pp-dp"]
AXIS_ORDERS: tuple[AxisOrder, ...] = ("tp-dp-pp", "tp-pp-dp")


class HasDegrees(Protocol):
    """What has degrees and an order of axes: a `Mesh` of a plan, or a `Setting`."""

    @property
    def dp(self) -> int:
        """Return the ranks that take different rows."""

    @property
    def tp(self) -> int:
        """Return the ranks that share the ops of a block."""

    @property
    def pp(self) -> int:
        """Return the number of pipeline stages."""

    @property
    def axis_order(self) -> AxisOrder:
        """Return the axes, innermost first."""


def stride_of(axis: Literal["dp", "tp", "pp"], mesh: HasDegrees) -> int:
    """Return how far apart in rank numbers neighbours on an axis are."""
    degrees = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}
    stride = 1
    for name in mesh.axis_order.split("-"):
        if name == axis:
            break
        stride *= degrees[name]
    return stride


def stage_of_rank(rank: int, mesh: HasDegrees) -> int:
    """Return the pipeline stage that a rank runs."""
    return rank // stride_of("pp", mesh) % mesh.pp


def ranks_of_stage(stage: int, mesh: HasDegrees) -> tuple[int, ...]:
    """Return the ranks of a stage; equal places in two stages are each other's peers."""
    world = mesh.dp * mesh.tp * mesh.pp
    return tuple(rank for rank in range(world) if stage_of_rank(rank, mesh) == stage)


def runs_stage(ranks: range, stage: int, mesh: HasDegrees) -> bool:
    """Return whether any of these neighbouring ranks, as far as the mesh has them, runs a stage."""
    last = min(ranks.stop, mesh.dp * mesh.tp * mesh.pp) - 1
    if last < ranks.start:
        return False
    stride = stride_of("pp", mesh)
    first = ranks.start // stride
    return first + (stage - first) % mesh.pp <= last // stride


@lru_cache(maxsize=4096)
def crosses_nodes(gpus: int, world: int, stride: int, pp: int, stage: int | None) -> bool:
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
