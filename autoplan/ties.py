"""Parameters that several ranks of a pipeline have: their gradients are summed over these ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from autoplan.meshes import HasDegrees, ranks_of_stage

__all__ = ["Tie", "make_ties"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A parameter with copies on several ranks of the pipeline; their gradients are summed.

    Attributes:
        fqn: its name on this rank.
        group: this rank's peers that have it.
        is_counted: this rank counts it in norms.
    """

    fqn: str
    group: dist.ProcessGroup
    is_counted: bool


def make_ties(
    shared: Iterable[tuple[str, Sequence[int]]], mesh: HasDegrees, own: int
) -> tuple[Tie, ...]:
    """Return those of this rank; makes the groups of all ranks.

    Args:
        shared: names, in one order on all ranks, with the ranks of the pipeline that have them.
        mesh: degrees and their order.
        own: this rank's in the pipeline.
    """
    ranks = [ranks_of_stage(rank, mesh) for rank in range(mesh.pp)]
    ties = []
    for fqn, on in shared:
        for peers in zip(*(ranks[rank] for rank in on), strict=True):
            group = dist.new_group(list(peers))
            if dist.get_rank() in peers:
                assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
                ties.append(Tie(fqn=fqn, group=group, is_counted=own == min(on)))
    return tuple(ties)
