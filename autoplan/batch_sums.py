"""Whether a loss is a sum over the rows of the batch, told op by op.

A step averages the losses of micro-batches and of data-parallel ranks. A sum over rows, such as a
loss with `reduction="sum"`, is then smaller than one device's by the number of parts; a mean is the
same. A sum that is divided by a count of rows is a mean.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from autoplan.autocast import bare
from autoplan.axis_labels import arguments, op_name
from autoplan.program import Op

__all__ = ["SUM_NOTE", "is_row_sum"]

SUM_NOTE = (
    "the loss is a sum over rows of the batch: a plan averages it over micro-batches and "
    "data-parallel ranks, so loss and gradients are those of one device divided by "
    "dp * num_microbatches; divide the loss by the number of rows, or pin dp=1 and "
    "num_microbatches=1"
)

_SUM_REDUCTION = 2  # torch.nn._reduction.get_enum("sum")
_KEEPING = frozenset((
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "reshape", "_unsafe_view", "squeeze",
    "unsqueeze", "select", "slice", "cat", "stack", "getitem", "clone", "alias", "to", "_to_copy",
    "type_as", "contiguous", "flatten", "where",
))  # fmt: skip


def is_row_sum(op: Op, *, reduces_rows: bool, sums: Set[str], made_of_rows: Set[str]) -> bool:
    """Return whether a result grows with the number of rows, as a sum over them does.

    Args:
        op: any.
        reduces_rows: it makes one value of rows of the batch.
        sums: the values so far that grow with the number of rows.
        made_of_rows: the values so far that the batch takes part in.
    """
    op = bare(op)
    name = op_name(op).removesuffix("_")
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    if reduces_rows:
        return name == "sum" or arguments(op).get("reduction") == _SUM_REDUCTION
    summed = [one for one in op.inputs() if one in sums]
    if not summed:
        return False
    if name in ("mul", "div"):
        # A number that it is divided by may be a count of rows; one that it is scaled by is none.
        others = [one for one in op.inputs() if one not in sums]
        is_scaled = name == "mul" and not any(one in made_of_rows for one in others)
        return is_scaled and not any(_may_be_share(value) for value in op.args)
    return name in _KEEPING


def _may_be_share(value: object) -> bool:
    """Return whether a factor may be one over a count of rows."""
    return isinstance(value, float) and 0 < value < 1 and abs(1 / value - round(1 / value)) < 1e-9
