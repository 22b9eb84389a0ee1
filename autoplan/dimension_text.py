"""The text of what each dimension of every op is, and along which each op can be sliced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.graph import BlockTrace, OpTrace, Placement, ShardOption, Trace

__all__ = ["dimension_report"]


def dimension_report(trace: Trace) -> str:
    """Return per block class a line for each op: its result, and how it can be sliced.

    A way to slice reads `heads(2): S(0), R* -> S(2)`: the axis of size 2, the placement of each
    operand, and of the result; `P` is an addend of it on every rank, `R*` is whole with a gradient
    that is an addend, `S(1,3)` are three slices of dimension 1.
    """
    calls = [call.block for call in trace.calls]
    parts = []
    for index, block in enumerate(trace.blocks):
        count = calls.count(index)
        head = f"{block.name}, {count} call{'s' * (count != 1)}"
        parts.append("\n".join([head, *_aligned(_rows(block))]))
    return "\n\n".join(parts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in rows)
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _rows(block: BlockTrace) -> list[tuple[str, ...]]:
    shapes = {value.name: value.shape for value in block.inputs}
    shapes |= {state.name: state.shape for state in block.states}
    rows: list[tuple[str, ...]] = [("op", "dimensions", "may be sharded")]
    rows += [(name, _read_as(block, name, shapes), "") for name in shapes]
    for op in block.ops:
        rows.append((op.name, _labelled(op.dimensions.output, op.shape), _slices(op)))
    return rows


def _read_as(block: BlockTrace, name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    """Return what the first reader takes the dimensions of an input for."""
    for op in block.ops:
        for value, labels in zip(op.inputs, op.dimensions.inputs, strict=False):
            if value == name:
                return _labelled(labels, shapes[name])
    return ""


def _labelled(labels: Sequence[str], shape: Sequence[int]) -> str:
    if len(labels) != len(shape):
        return " x ".join(labels)
    return " x ".join(f"{label} {size}" for label, size in zip(labels, shape, strict=True))


def _slices(op: OpTrace) -> str:
    return "; ".join(map(_slice, op.dimensions.slices))


def _slice(option: ShardOption) -> str:
    is_sum = Placement.parse(option.output).kind == "partial"
    result = "a sum" if is_sum else option.output
    return f"{option.axis}({option.size}): {', '.join(option.inputs)} -> {result}"
