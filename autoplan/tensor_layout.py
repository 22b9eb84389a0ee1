"""The tensor-parallel layout of Megatron-LM, chosen by rule instead of by search.

Shoeybi et al. 2019, section 3: the first product of a pair is split by its outputs, the second by
its inputs, so that one all_reduce forward and one backward are left. With sequence parallelism
(Korthikanti et al. 2022, section 4.2.2) what lies between is sliced along the tokens, and each
all_reduce becomes a reduce_scatter and an all_gather.
"""

from __future__ import annotations

from typing import Literal

from autoplan.graph import BlockTrace, OpTrace, ShardOption, ValueTrace

__all__ = [
    "SEQUENCE",
    "TOKEN_BORDERS",
    "WHOLE_BORDERS",
    "Border",
    "Borders",
    "border_dim",
    "boundary_of",
    "leaving_placement",
    "megatron_axes",
]

SEQUENCE = "S(1)"  # (batch, tokens, features)

Border = Literal["whole", "tokens", "features"]
"""How an activation of shape (batch, tokens, features) is handed over: whole on every rank, or in
slices along a dimension, one per rank."""

Borders = tuple[Border, Border]
"""How activations enter a block, and how they leave it."""

WHOLE_BORDERS: Borders = ("whole", "whole")
TOKEN_BORDERS: Borders = ("tokens", "tokens")

_SLICED_DIMS = {"tokens": 1, "features": 2}


def boundary_of(value: ValueTrace, degree: int, border: Border) -> str:
    """Return the placement of a value that enters a block."""
    if not (value.is_activation and value.needs_grad):
        return "R"
    return leaving_placement(value.shape, degree, border)


def leaving_placement(shape: tuple[int, ...], degree: int, border: Border) -> str:
    """Return the placement of an activation of that shape at a border of blocks."""
    dim = border_dim(shape, degree, border)
    return "R" if dim is None else f"S({dim})"


def border_dim(shape: tuple[int, ...], degree: int, border: Border) -> int | None:
    """Return the dimension along which an activation is sliced at a border; None if it is whole."""
    dim = _SLICED_DIMS.get(border)
    return dim if dim is not None and len(shape) == 3 and shape[dim] % degree == 0 else None


def megatron_axes(
    block: BlockTrace, degree: int, *, is_sequence_parallel: bool = False
) -> dict[str, str]:
    """Return an axis per op that is not whole, for `localize`.

    Args:
        block: the class.
        degree: tensor-parallel degree, above 1.
        is_sequence_parallel: activations outside products and attention are slices of tokens.
    """
    states = {state.name for state in block.states if state.is_parameter}
    border: Border = "tokens" if is_sequence_parallel else "whole"
    where = {v.name: boundary_of(v, degree, border) for v in block.inputs}
    axes: dict[str, str] = {}
    for op in block.ops:
        legal = [o for o in op.options if o.size == 1 or o.size % degree == 0]
        taken = _taken_slices(block, op, degree)
        chosen = _chosen(op, legal, where, states, is_sequence_parallel, taken)
        where[op.name] = "R" if chosen is None else chosen.output
        if chosen is not None:
            axes[op.name] = chosen.axis
    return axes


def _chosen(
    op: OpTrace,
    legal: list[ShardOption],
    where: dict[str, str],
    states: set[str],
    is_sequence_parallel: bool,
    taken: set[str],
) -> ShardOption | None:
    """Return the option of an op; None: whole. `taken`: slices in which its result can be read."""
    sliced = [o for o in legal if o.axis != "whole"]
    is_weighted = op.kind == "gemm" and any(name in states for name in op.inputs)
    if is_weighted:
        return _product(op, sliced, where, taken)
    if op.target == "aten.embedding.default":
        return next((o for o in sliced if o.axis == "vocabulary"), None)
    now = [where[name] for name in op.inputs if name in where]
    for option in sliced:
        if _activations(op, option, where) == now and any(p != "R" for p in now):
            return option
    if is_sequence_parallel and now and now[0] not in ("R", "P", SEQUENCE):
        # Features that are sliced stay so, and slices of tokens beside them are gathered.
        for option in sliced:
            if _activations(op, option, where)[0] == now[0]:
                return option
    if is_sequence_parallel and any(p in ("P", SEQUENCE) for p in now):
        wanted = [
            o
            for o in sliced
            if o.output == SEQUENCE and set(_activations(op, o, where)) <= {SEQUENCE, "R", "S(0)"}
        ]
        return wanted[0] if wanted else None
    return None


def _taken_slices(block: BlockTrace, op: OpTrace, degree: int) -> set[str]:
    """Return the placements in which the ops that read a result can take it."""
    found: set[str] = set()
    for reader in block.ops:
        for place, name in enumerate(reader.inputs):
            if name == op.name:
                legal = (o for o in reader.options if o.size == 1 or o.size % degree == 0)
                found |= {o.inputs[place] for o in legal if o.inputs}
    return found | ({"S(2)"} if op.name in block.outputs else set())


def _product(
    op: OpTrace, sliced: list[ShardOption], where: dict[str, str], taken: set[str]
) -> ShardOption | None:
    """Return the row-parallel option where the input lies in its slices, else the column one.

    A result that nothing can read in columns, such as what a norm over it or a choice of experts
    reads, is computed from slices of tokens by whole weights (Megatron-LM, `TELinear` with the mode
    `duplicated`, and `Router`); so are experts that tensor parallelism does not divide.
    """
    now = [where[name] for name in op.inputs if name in where]
    for option in sliced:
        if option.gemm_dim == "k" and _activations(op, option, where) == now:
            return option
    column = next((o for o in sliced if o.gemm_dim == "n"), None)
    if column is None or column.output not in taken:
        for option in sliced:
            if option.gemm_dim == "m" and _activations(op, option, where) == now != ["R"]:
                return option
    return column


def _activations(op: OpTrace, option: ShardOption, where: dict[str, str]) -> list[str]:
    return [p for name, p in zip(op.inputs, option.inputs, strict=True) if name in where]
