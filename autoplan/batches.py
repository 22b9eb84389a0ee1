"""The forms a batch and a loss may have, and the model with its loss as one module.

A mapping is passed by keyword, a tuple by position (its last element is the target if the loss
function takes two arguments), anything else as the only argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import TraceError

__all__ = ["LossFn", "LossModule", "batch_rows", "microbatch_like", "reduce_loss", "split_batch"]

LossFn = Callable[..., torch.Tensor]


class LossModule(nn.Module):
    """The model with its loss as one module of flat tensor inputs."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        spec: Any,
        leaves: Sequence[Any],
        tensor_at: Sequence[int],
    ) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._spec = spec
        self._others = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self._tensor_at = list(tensor_at)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self._others)
        for index, tensor in zip(self._tensor_at, tensors, strict=True):
            leaves[index] = tensor
        batch = pytree.tree_unflatten(leaves, self._spec)
        args, kwargs, target = split_batch(self.model, batch, self._loss_fn)
        output = self.model(*args, **kwargs)
        return reduce_loss(output, self._loss_fn, target)


def reduce_loss(output: Any, loss_fn: LossFn | None, target: tuple[Any, ...]) -> torch.Tensor:
    """Return the scalar loss of a model's output; see `capture` for the forms allowed."""
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(output, *target)
    elif isinstance(output, torch.Tensor):
        loss = output
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else loss
        raise TraceError(
            f"the loss is {got}: it must be a tensor with one element; pass loss_fn=, or a batch "
            "with which the model returns its loss (HF models: labels)"
        )
    return loss


def split_batch(
    model: nn.Module, batch: Any, loss_fn: LossFn | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return `(args, kwargs, target)`: what `forward` gets and what `loss_fn` gets beside."""
    wants_target = loss_fn is not None and _num_positional(loss_fn) >= 2
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        kwargs = {k: v for k, v in batch.items() if takes_all or k in accepted}
        return (), kwargs, ((batch,) if wants_target else ())
    args = batch if isinstance(batch, tuple) else (batch,)
    if wants_target:
        if len(args) < 2:
            raise TraceError(
                "loss_fn takes (output, target) but the batch has one element: "
                "pass the batch as (input, target) or as a mapping"
            )
        return tuple(args[:-1]), {}, (args[-1],)
    return tuple(args), {}, ()


def _num_positional(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def batch_rows(batch: Any) -> int:
    """Return the size of the batch dimension: dimension 0 of the first tensor with one."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise TraceError("the batch holds no tensor with a batch dimension")


def microbatch_like(batch: Any, rows: int) -> Any:
    """Return meta tensors like `batch` with `rows` in the batch dimension; each one distinct."""
    full = batch_rows(batch)

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        has_rows = leaf.dim() > 0 and leaf.shape[0] == full
        shape = (rows, *leaf.shape[1:]) if has_rows else tuple(leaf.shape)
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return pytree.tree_map(resize, batch)
