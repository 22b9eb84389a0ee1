"""Which collectives turn one placement into another, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.graph import Placement

__all__ = ["Transition", "transition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Collectives of a conversion: all_reduce, all_gather, reduce_scatter, slice or none."""

    forward: str
    backward: str


_TABLE = {
    ("replicate", "replicate"): ("", ""),
    ("replicate", "partial_gradient"): ("", "all_reduce"),
    ("replicate", "shard"): ("slice", "all_gather"),
    ("shard", "replicate"): ("all_gather", "slice"),
    ("shard", "partial_gradient"): ("all_gather", "reduce_scatter"),
    ("partial", "replicate"): ("all_reduce", ""),
    ("partial", "partial_gradient"): ("all_reduce", "all_reduce"),
    ("partial", "shard"): ("reduce_scatter", "all_gather"),
    ("partial", "partial"): ("", ""),
}


def transition(produced: Placement, required: Placement) -> Transition | None:
    """Return how a value made as `produced` becomes `required`, or None where it cannot.

    The gradient goes the other way: the transpose of a slice is a gather, of an all-reduce of
    addends the identity (Shoeybi et al. 2019, operators f and g; Korthikanti et al. 2022, g-bar).
    """
    if produced == required:
        return Transition(forward="", backward="")
    pair = _TABLE.get((produced.kind, required.kind))
    return None if pair is None else Transition(forward=pair[0], backward=pair[1])
