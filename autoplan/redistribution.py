"""What it takes to change a placement: a table of collectives, forward and backward; no torch."""

from __future__ import annotations

from autoplan.graph import Placement

__all__ = ["transition"]

_FROM_REPLICATE = {
    "replicate": ("", ""),
    "partial_gradient": ("", "all_reduce"),
    "shard": ("slice", "all_gather"),
}
_FROM_SHARD = {
    "replicate": ("all_gather", "slice"),
    "partial_gradient": ("all_gather", "reduce_scatter"),
}
_FROM_PARTIAL = {
    "replicate": ("all_reduce", ""),
    "partial_gradient": ("all_reduce", "all_reduce"),
    "shard": ("reduce_scatter", "all_gather"),
    "partial": ("", ""),
}


def transition(produced: Placement, required: Placement) -> tuple[str, str] | None:
    """Return what turns one placement into another: (forward, backward), or None if nothing does.

    Empty means that a direction needs nothing. `slice` takes the rank's own part and is local; the
    others are collectives over the tensor-parallel group. Values are never produced as R* and a
    replicated value never becomes addends, so these are None, as are two slices of one dimension.
    """
    if produced.kind == "replicate":
        return _FROM_REPLICATE.get(required.kind)
    if produced.kind == "partial":
        return _FROM_PARTIAL.get(required.kind)
    if produced.kind != "shard":
        return None
    if required.kind != "shard":
        return _FROM_SHARD.get(required.kind)
    if produced == required:
        return "", ""
    return ("all_to_all", "all_to_all") if produced.dim != required.dim else None
