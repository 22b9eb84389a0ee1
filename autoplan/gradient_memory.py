"""Which parameters may get gradients that lie in memory of other gradients, told from a graph.

Autograd takes the first gradient that a parameter gets as it is if no other tensor object is it,
also where it is a view of a gradient that goes on to other places. Most ops make the gradients of
their parameters anew, and need no watching; see `calls.own_gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from autoplan.autocast import bare
from autoplan.axis_labels import arguments, op_name
from autoplan.program import BlockGraph, Op, Ref, refs

__all__ = ["may_share_gradient"]

# Arguments whose gradients an op makes by arithmetic, whatever the shapes.
_MADE: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight"),
    "addmm": ("mat1", "mat2"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "matmul": ("self", "other"),
    "mul": ("self", "other"),
    "embedding": ("weight",),
    "rms_norm": ("weight",),
    "layer_norm": ("input", "weight", "bias"),
    "native_layer_norm": ("input", "weight", "bias"),
    "group_norm": ("input", "weight", "bias"),
    "batch_norm": ("input", "weight", "bias"),
    "conv1d": ("input", "weight", "bias"),
    "conv2d": ("input", "weight", "bias"),
    "conv3d": ("input", "weight", "bias"),
    "convolution": ("input", "weight", "bias"),
    "_grouped_mm": ("self", "mat2"),
    # Put into zeros of the whole's shape, or joined.
    **dict.fromkeys(
        ("select", "slice", "index", "index_select", "split", "split_with_sizes", "unbind"),
        ("self",),
    ),
}
# Gradients of these are summed over the rows: made anew unless there is one row only.
_SUMMED: Mapping[str, str] = {"linear": "bias", "addmm": "self"}
# The gradient is that of the result, in another shape.
_VIEWS = frozenset((
    "t", "transpose", "permute", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze",
    "expand", "contiguous", "to", "_to_copy",
))  # fmt: skip


def may_share_gradient(graph: BlockGraph) -> frozenset[str]:
    """Return the states of a graph whose gradients may lie where other gradients lie."""
    risky: set[str] = set(graph.outputs)
    for op in reversed(graph.ops):
        if _is_view(op) and op.name not in risky:
            continue
        risky.update(set(op.inputs()) - _made(op, graph))
    return frozenset(state.name for state in graph.states if state.name in risky)


def _is_view(op: Op) -> bool:
    target = bare(op).target
    return isinstance(target, torch._ops.OpOverload) and op_name(bare(op)) in _VIEWS


def _made(op: Op, graph: BlockGraph) -> set[str]:
    """Return the values that an op reads only in places whose gradients it makes anew."""
    plain = bare(op)
    if not isinstance(plain.target, torch._ops.OpOverload):
        return set()
    name = op_name(plain)
    fresh = _MADE.get(name, ())
    found: set[str] = set()
    others: set[str] = set()
    for place, value in arguments(plain).items():
        is_fresh = place in fresh or (_SUMMED.get(name) == place and _is_summed(op, value, graph))
        (found if is_fresh else others).update(refs(value))
    return found - others


def _is_summed(op: Op, value: object, graph: BlockGraph) -> bool:
    """Return whether a result has more elements than an operand that is added to it."""
    meta = graph.meta(value.name) if isinstance(value, Ref) else None
    if meta is None or op.meta is None:
        return False
    return prod(meta.shape) < prod(op.meta.shape)
