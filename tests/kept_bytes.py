"""Two ways to count what autograd keeps for backward: on real tensors, and from a trace."""

from __future__ import annotations

from autoplan.graph import BlockTrace
from benchmarks.kept_bytes import kept_by_autograd, kept_by_trace

__all__ = ["kept_by_autograd", "kept_by_block", "kept_by_trace"]


def kept_by_block(block: BlockTrace) -> list[int]:
    """Return the sorted sizes of the storages that one block keeps, its inputs included."""
    kept: dict[object, int] = {}
    for op in block.ops:
        for index, saved in enumerate(op.saved):
            kept[saved.value or (op.name, index)] = saved.nbytes
    return sorted(kept.values())
