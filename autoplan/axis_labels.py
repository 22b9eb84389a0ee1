"""Einsum-like rules: a label per dimension of operands and result, and how labels are applied."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from autoplan.axes import RESULT, Analysis, Dim, GemmDim, Link, Rule, Side, equate, fresh, leaves
from autoplan.program import Op, Ref

__all__ = ["Labels", "aligned", "along", "arguments", "labelled", "op_name", "rank_of", "reference"]


def op_name(op: Op) -> str:
    """Return the operator's name without namespace and overload, such as `linear`."""
    if isinstance(op.target, torch._ops.OpOverload):
        namespace, _, name = op.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return "getitem" if op.target is operator.getitem else op.target_name


def arguments(op: Op) -> dict[str, Any]:
    """Return the op's arguments by the names of its schema, defaults filled in."""
    assert isinstance(op.target, torch._ops.OpOverload), op.target_name
    bound: dict[str, Any] = {}
    for index, argument in enumerate(op.target._schema.arguments):
        if index < len(op.args):
            bound[argument.name] = op.args[index]
        elif argument.name in op.kwargs:
            bound[argument.name] = op.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


Labels = Sequence[int | str | None]


def labelled(
    found: Analysis,
    op: Op,
    operands: Sequence[tuple[str, Labels]],
    result: Labels,
    *,
    contracts: Mapping[int | str, GemmDim] | None = None,
    gemm: Mapping[int | str, GemmDim] | None = None,
    is_view: bool = False,
    may_invent: bool = False,
) -> Rule:
    """Apply an einsum-like rule: dims with one label are one axis, None is needed whole.

    Args:
        operands: per operand its value name and a label per dim; dims of size 1 join no label.
        result: label per dim of the result.
        contracts: labels that may be sliced although the result lacks them, with their gemm dim.
        gemm: gemm dim of the other labels.
        is_view: see `Rule`.
        may_invent: whether a label may stand in the result only (expand).
    """
    assert op.meta is not None
    rule = Rule(operands=tuple(name for name, _ in operands), is_view=is_view)
    dims = [found.result(name) for name, _ in operands]
    sides: dict[int | str, list[Side]] = {}
    for index, (_, labels) in enumerate(operands):
        for dim, label in enumerate(labels):
            if label is None:
                rule.blocked.append(dims[index][dim])
            elif leaves(dims[index][dim]):
                sides.setdefault(label, []).append(Side(index, (dim,)))
    agreed: dict[int | str, Dim] = {}
    for label, places in sides.items():
        first = dims[places[0].operand][places[0].dims[0]]
        if all(equate(first, dims[p.operand][p.dims[0]]) for p in places[1:]):
            agreed[label] = first
        else:
            rule.blocked += [dims[p.operand][p.dims[0]] for p in places]
    made: list[Dim] = []
    for dim, (label, size) in enumerate(zip(result, op.meta.shape, strict=True)):
        known = label is not None and label in agreed
        made.append(agreed[label] if known and label is not None else fresh(size))
        if label is not None and size > 1 and (known or (may_invent and label not in sides)):
            sides.setdefault(label, []).append(Side(RESULT, (dim,)))
            agreed.setdefault(label, made[-1])
        elif not known:
            rule.blocked.append(made[-1])
        if label is not None and size == 1:
            found.alike += _places(operands, dims, label, made[-1])
    found.dims[op.name] = made
    roles = {**(gemm or {}), **(contracts or {})}
    for label, dim_atoms in agreed.items():
        in_result = any(side.operand == RESULT for side in sides[label])
        if in_result or label in (contracts or {}):
            size = prod(atom.size for atom in leaves(dim_atoms))
            link = Link(size=size, sides=tuple(sides[label]), gemm_dim=roles.get(label, ""))
            rule.links.append(link)
    return rule


def _places(
    operands: Sequence[tuple[str, Labels]], dims: Sequence[Sequence[Dim]], label: Any, made: Dim
) -> list[tuple[Dim, Dim]]:
    """Return the dimensions that bear a label, each with the one that is made of them."""
    return [
        (dims[index][dim], made)
        for index, (_, labels) in enumerate(operands)
        for dim, own in enumerate(labels)
        if own == label
    ]


def reference(value: Any) -> str | None:
    """Return the name of a value that stands as an argument; None of anything else."""
    return value.name if isinstance(value, Ref) else None


def rank_of(found: Analysis, name: str) -> int:
    """Return the number of dimensions of a value."""
    return len(found.result(name))


def aligned(rank: int, out_rank: int) -> list[int | str | None]:
    """Return the labels of an operand of `rank` dims that is broadcast to `out_rank` dims."""
    return list(range(out_rank - rank, out_rank))


def along(found: Analysis, op: Op, whole: set[int], *, is_view: bool) -> Rule | None:
    """Apply the rule of an op that keeps the shape and needs the dims in `whole` whole."""
    name = reference(op.args[0])
    assert op.meta is not None
    if name is None or rank_of(found, name) != len(op.meta.shape):
        return None
    labels = [None if dim in whole else dim for dim in range(len(op.meta.shape))]
    operands = [(name, labels)]
    operands += [(n, [None] * rank_of(found, n)) for n in op.inputs() if n != name]
    return labelled(found, op, operands, labels, is_view=is_view)
