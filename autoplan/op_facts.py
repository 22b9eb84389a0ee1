"""What an op's schema says of it: whether it writes, shares storage, or draws random numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch

from autoplan.autocast import bare
from autoplan.opaque import OpaqueCall
from autoplan.program import Op, refs

__all__ = ["is_random", "mutates_input", "storage_owners", "written_inputs", "written_values"]


def mutates_input(op: Op) -> bool:
    """Return whether the operator's schema says that it writes to one of its arguments."""
    op = bare(op)
    if isinstance(op.target, OpaqueCall):
        return bool(op.target.writes)
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    name = op.target._schema.name
    if name in ("aten::batch_norm", "aten::instance_norm"):
        return bool(op.args[5])
    return op.target._schema.is_mutable


def written_inputs(op: Op) -> tuple[str, ...]:
    """Return the names of the values that the operator writes to."""
    op = bare(op)
    if not mutates_input(op):
        return ()
    if isinstance(op.target, OpaqueCall):
        return tuple(refs([op.args[i] for i in op.target.writes]))
    schema = op.target._schema  # type: ignore[attr-defined]
    if schema.name in ("aten::batch_norm", "aten::instance_norm"):
        return tuple(refs(op.args[3:5]))
    found: list[str] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            is_positional = index < len(op.args)
            value = op.args[index] if is_positional else op.kwargs.get(argument.name)
            found.extend(refs(value))
    return tuple(found)


def storage_owners(ops: Sequence[Op]) -> dict[str, str]:
    """Return, for every result that may share the storage of an earlier value, that value.

    Views of views lead to the first; what an operator's schema says of its result counts.
    """
    owners: dict[str, str] = {}
    for op in ops:
        if op.inputs() and _may_alias(op):
            source = op.inputs()[0]
            owners[op.name] = owners.get(source, source)
    return owners


def _may_alias(op: Op) -> bool:
    target = bare(op).target
    if isinstance(target, torch._ops.OpOverload):
        return _returns_alias(target)
    return target is operator.getitem


@functools.cache
def _returns_alias(target: torch._ops.OpOverload) -> bool:
    return any(result.alias_info is not None for result in target._schema.returns)


def written_values(ops: Sequence[Op]) -> set[str]:
    """Return the values whose storage some op writes to: inputs, states, and results."""
    owners = storage_owners(ops)
    return {owners.get(name, name) for op in ops for name in written_inputs(op)}


def is_random(op: Op) -> bool:
    """Return whether the operator draws from the random state with the arguments it has."""
    op = bare(op)
    if isinstance(op.target, OpaqueCall):
        return op.target.is_random
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    name = op.target._schema.name.removeprefix("aten::")
    if name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "native_dropout"):
        return bool(op.args[1] > 0 and op.args[2])
    if name == "scaled_dot_product_attention":
        rate = op.args[4] if len(op.args) > 4 else op.kwargs.get("dropout_p", 0.0)
        return bool(rate > 0)
    return torch.Tag.nondeterministic_seeded in op.target.tags
