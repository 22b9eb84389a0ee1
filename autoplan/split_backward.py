"""Whether the backward of a stage can be split: first to its inputs, later to its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["hands_on_parameters", "reads_again"]


def reads_again(outputs: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]) -> bool:
    """Return whether what a parameter was read for enters where the same parameter is read again.

    Torch starts the backward to a parameter at all places that read it. Where one of them is on the
    way from another to the parameter, the graph between them runs a second time, after it has been
    freed.

    Args:
        outputs: of the stage, or its loss.
        inputs: of the stage.
    """
    targets = {_node(x) for x in inputs if x.requires_grad}
    reached: dict[Any, bool] = {None: False}  # whether an input is below a node
    below: dict[Any, int] = {None: 0}  # parameters below a node, a bit for each
    parameters = 0
    for node in _children_first([_node(x) for x in outputs if x.requires_grad]):
        children = [child for child, _ in node.next_functions]
        if node in targets:
            reached[node], below[node] = True, 0
            continue
        if hasattr(node, "variable"):
            reached[node], below[node] = False, 1 << parameters
            parameters += 1
            continue
        reached[node] = any(reached[child] for child in children)
        beside, along = 0, 0
        for child in children:
            if reached[child]:
                along |= below[child]
            else:
                beside |= below[child]
        if reached[node] and beside & along:
            return True
        below[node] = beside | along
    return False


def hands_on_parameters(outputs: Sequence[torch.Tensor], inputs: Iterable[torch.Tensor]) -> bool:
    """Return whether an output follows from parameters alone.

    Torch keeps gradients for later where parameters come to what inputs go into. The gradient of
    such an output comes to no such place, and would be lost.

    Args:
        outputs, inputs: as in `reads_again`.
    """
    targets = {_node(x) for x in inputs if x.requires_grad}
    ends = [_node(x) for x in outputs if x.requires_grad]
    reached: dict[Any, bool] = {None: False}  # whether an input is below a node
    for node in _children_first(ends):
        below = any(reached[child] for child, _ in node.next_functions)
        reached[node] = node in targets or below
    return not all(reached[end] for end in ends)


def _node(tensor: torch.Tensor) -> Any:
    """Return the node that gives a tensor its gradient; a leaf has one that adds it up."""
    if tensor.grad_fn is not None:
        return tensor.grad_fn
    return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _children_first(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of an autograd graph once, after all that its gradients go to."""
    seen: set[Any] = {None}
    for root in roots:
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child, _ in node.next_functions]
