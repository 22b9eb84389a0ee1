"""Which measured class an op belongs to, and the sizes to look it up by."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autoplan.graph import OpTrace

__all__ = ["ClassPoint", "class_point"]

_CLASSES = {
    "layer_norm": "layer_norm",
    "native_layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
    "batch_norm": "batch_norm",
    "group_norm": "group_norm",
    "softmax": "softmax",
    "_softmax": "softmax",
    "cross_entropy_loss": "cross_entropy",
    "embedding": "embedding",
    "dropout": "dropout",
    "native_dropout": "dropout",
    "gelu": "gelu",
    "silu": "silu",
    "silu_": "silu",
    "relu": "relu",
    "relu_": "relu",
    "mul": "mul",
    "mul_": "mul",
}
_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPoint:
    """Where an op stands in the table of its class."""

    op_class: str
    dtype: str
    rows: int
    width: int


def class_point(op: OpTrace) -> ClassPoint | None:
    """Return the class of an op with the sizes of its input, read off its signature, if it has one.

    The width is the last dimension, for batch and group norms the channels; an embedding counts by
    its result, a product of two tensors by the first.
    """
    name = op.target.removeprefix("aten.").partition(".")[0]
    if name not in _CLASSES or not op.target.startswith("aten."):
        return None
    tensors = [
        (dtype, tuple(int(size) for size in sizes.split(",") if size.strip()))
        for dtype, sizes in _TENSOR.findall(op.signature.partition("(")[2])
    ]
    if not tensors or not tensors[0][1]:
        return None
    dtype, shape = tensors[0]
    kind = _CLASSES[name]
    if kind == "embedding":
        return ClassPoint(
            op_class=kind, dtype=dtype, rows=math.prod(tensors[1][1]), width=shape[-1]
        )
    width = shape[1] if kind in ("batch_norm", "group_norm") else shape[-1]
    if width == 0:
        return None
    return ClassPoint(op_class=kind, dtype=dtype, rows=math.prod(shape) // width, width=width)
