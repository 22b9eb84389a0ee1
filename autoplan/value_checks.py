"""Which nodes of an exported graph do nothing but check values.

A model that asserts something about its batch (that there are as many image tokens as image
features, that labels are in range) leaves assertions in an export, and what computes their
conditions: sizes and values that depend on data. None of it changes a result.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["checking_nodes"]

_CHECKS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_async.default",
        "aten._assert_async.msg",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


def checking_nodes(graph: Any) -> frozenset[Any]:
    """Return the nodes of a `torch.fx` graph whose values only assertions read, and these.

    A number that nothing reads (an `.item()` for a log) is one of them too. An op that writes to
    its arguments or draws random numbers is none: leaving it out would change what others give.
    """
    found: set[Any] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        is_unread = all(user in found for user in node.users)
        is_for_checks = bool(node.users) or not _holds_tensors(node.meta.get("val"))
        if str(node.target) in _CHECKS or (is_unread and is_for_checks and _is_pure(node.target)):
            found.add(node)
    return frozenset(found)


def _holds_tensors(value: Any) -> bool:
    leaves = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _is_pure(target: Any) -> bool:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    if isinstance(target, torch._ops.OpOverload):
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        return not target._schema.is_mutable and not is_random
    return True
