"""The ways to run an op of a block that its states and borders allow, and to mark it as kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoplan.graph import BlockTrace, OpTrace, ShardOption
from autoplan.tensor_layout import Border, leaving_placement

__all__ = ["border_ways", "has_options", "legal_options", "may_keep"]

_NO_SLICES: Mapping[str, str] = MappingProxyType({})


def border_ways(block: BlockTrace, degree: int) -> tuple[Border, ...]:
    """Return the ways to hand activations over that differ for a class, the simplest first."""
    ways: tuple[Border, ...] = ("whole", "tokens", "features")
    shapes = [v.shape for v in block.inputs if v.is_activation and v.needs_grad]
    shapes += [op.shape for op in block.ops if op.name in block.outputs and op.needs_grad]
    placed = {way: [leaving_placement(s, degree, way) for s in shapes] for way in ways}
    can_slice = {way: degree > 1 and set(placed[way]) != {"R"} for way in ways}
    return tuple(way for way in ways if way == "whole" or can_slice[way])


def legal_options(
    op: OpTrace, degree: int, whole: frozenset[str], slices: Mapping[str, str] = _NO_SLICES
) -> tuple[ShardOption, ...]:
    """Return the ways to run an op at a degree that read states as they must be stored.

    Args:
        op: with its options.
        degree: that must divide what is sliced.
        whole: states that no option may slice.
        slices: placement of the states that every option must read in it.
    """
    options = op.options or (
        ShardOption(
            axis="whole", size=1, inputs=("R",) * len(op.inputs), output="R", is_split=False
        ),
    )
    if degree == 1:
        return options[:1]

    def reads_as_stored(option: ShardOption) -> bool:
        return not any(
            (name in whole and placement.startswith("S"))
            or slices.get(name, placement) != placement
            for name, placement in zip(op.inputs, option.inputs, strict=True)
        )

    return tuple(
        o
        for o in options
        if (o.axis in ("whole", "partial") or o.size % degree == 0) and reads_as_stored(o)
    )


def has_options(
    block: BlockTrace, degree: int, slices: Sequence[tuple[str, str]], whole: frozenset[str]
) -> bool:
    """Return whether every op of a block can read states as they must be stored."""
    placed = dict(slices)
    rest = whole.difference(placed)
    return all(legal_options(op, degree, rest, placed) for op in block.ops)


def may_keep(op: OpTrace, option: ShardOption) -> bool:
    """Return whether a mark is legal: never on an op that is run as several local kernels.

    The vocabulary-parallel embedding and loss save intermediate results, or reduce them in place.
    """
    is_many = op.kind != "gemm" and option.is_split and option.output in ("P", "R")
    return op.may_mark and op.mark_bytes > 0 and not is_many
