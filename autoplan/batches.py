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

from autoplan.assigned_states import call_and_keep_states
from autoplan.batch_forms import learn_forms, parts_of
from autoplan.errors import TraceError

__all__ = [
    "BatchDims",
    "LossFn",
    "LossModule",
    "OutputModule",
    "batch_dims",
    "batch_rows",
    "microbatch_like",
    "reduce_loss",
    "split_batch",
]

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

    def batch_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the batch with these tensors in it."""
        leaves = list(self._others)
        for index, tensor in zip(self._tensor_at, tensors, strict=True):
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        batch = self.batch_of(tensors)
        args, kwargs, target = split_batch(self.model, batch, self._loss_fn)
        output = call_and_keep_states(self.model, args, kwargs)
        return reduce_loss(output, self._loss_fn, target)


class _OutputForm:
    """The form of an output; no list or dict, since export puts those back after a forward."""

    spec: Any = None
    leaves: Sequence[Any] = ()
    is_tensor: Sequence[bool] = ()


class OutputModule(LossModule):
    """The model as one module of flat tensor inputs that returns the tensors of its output.

    A forward notes the output's pytree, with the position of each tensor in it.
    """

    def __init__(
        self, model: nn.Module, spec: Any, leaves: Sequence[Any], tensor_at: Sequence[int]
    ) -> None:
        super().__init__(model, None, spec, leaves, tensor_at)
        self._form = _OutputForm()

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs, _ = split_batch(self.model, self.batch_of(tensors), None)
        output = call_and_keep_states(self.model, args, kwargs)
        learn_forms(output)
        leaves, spec = pytree.tree_flatten(output)
        found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not found:
            raise TraceError("the model returns no tensor")
        places = iter(range(len(found)))
        at = [next(places) if isinstance(x, torch.Tensor) else x for x in leaves]
        is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        self._form.spec, self._form.leaves, self._form.is_tensor = spec, at, is_tensor
        return tuple(found)

    def output_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the model returned, with these tensors in it."""
        form = self._form
        both = zip(form.leaves, form.is_tensor, strict=True)
        return pytree.tree_unflatten([tensors[x] if is_one else x for x, is_one in both], form.spec)


def reduce_loss(output: Any, loss_fn: LossFn | None, target: tuple[Any, ...]) -> torch.Tensor:
    """Return the scalar loss of a model's output; see `capture` for the forms allowed."""
    loss = loss_fn(output, *target) if loss_fn is not None else _own_loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = _described(loss)
        if loss is None and loss_fn is None:
            got = f"missing: the model returns {_described(output)}"
        raise TraceError(
            f"the loss is {got}; it must be a tensor with one element: pass loss_fn=, or a batch "
            "with which the model returns its loss alone, as loss or under the name loss (HF "
            "models: labels), or as the only number with a gradient in a tuple"
        )
    return loss


def _own_loss(output: Any) -> Any:
    """Return the loss in a model's output; None where it has none."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    parts = output if isinstance(output, (tuple, list)) else ()
    trained = [x for x in parts if isinstance(x, torch.Tensor) and x.requires_grad]
    numbers = [x for x in trained if x.numel() == 1]
    return numbers[0] if len(numbers) == 1 else None


def _described(value: Any) -> str:
    """Return what a value is, for a message: a tensor by its shape, a container by its parts."""
    if isinstance(value, torch.Tensor):
        trained = " with a gradient" if value.requires_grad else ""
        return f"a tensor of shape {tuple(value.shape)}{trained}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(_described(part) for part in value[:4])
        return f"a {type(value).__name__} of {len(value)}: {parts or 'nothing'}"
    is_plain = value is None or isinstance(value, (int, float))
    return repr(value) if is_plain else f"a {type(value).__name__}"


def split_batch(
    model: nn.Module, batch: Any, loss_fn: LossFn | None
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return `(args, kwargs, target)`: what `forward` gets and what `loss_fn` gets beside."""
    wants_target = loss_fn is not None and _num_positional(loss_fn) >= 2
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        kwargs = {k: v for k, v in batch.items() if takes_all or k in accepted}
        _check_call(model, (), kwargs, f"the batch has the keys {', '.join(map(repr, batch))}")
        return (), kwargs, ((batch,) if wants_target else ())
    args = batch if isinstance(batch, tuple) else (batch,)
    if wants_target:
        if len(args) < 2:
            raise TraceError(
                "loss_fn takes (output, target) but the batch has one element: "
                "pass the batch as (input, target) or as a mapping"
            )
        _check_call(
            model, args[:-1], {}, f"of the {len(args)} parts of the batch the last goes to loss_fn"
        )
        return tuple(args[:-1]), {}, (args[-1],)
    _check_call(model, args, {}, f"the batch has {len(args)} part{'s' * (len(args) > 1)}")
    return tuple(args), {}, ()


def _check_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: str
) -> None:
    """Raise if `forward` cannot be called with the batch.

    Raises:
        TraceError: says what `forward` takes and what is given.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"{type(model).__name__}.forward{signature} cannot be called with the batch: {error}; "
            f"{given}: pass a mapping with the names of forward's arguments (other keys are left "
            "to loss_fn), or a tuple in their order (with a loss_fn(output, target) the target "
            "last)"
        ) from None


def _num_positional(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


class BatchDims(tuple[int | None, ...]):
    """Per tensor leaf of a batch, in pytree order: its batch dimension, or None without one.

    Where a `batch_dim` is taken, it stands for itself.
    """

    __slots__ = ()


def batch_dims(batch: Any, batch_dim: Any = 0) -> BatchDims:
    """Return the batch dimension of every tensor of a batch.

    Args:
        batch: example input.
        batch_dim: an int tells it for every tensor of the size of the first one there; others have
            no batch. A mapping, tuple or list of the form of `batch` tells it for each part: an
            int, or None for no batch. Keys of a mapping that are left out are 0, by the same rule.

    Raises:
        ValueError: `batch_dim` does not fit `batch`, or what it tells has unequal sizes.
        TraceError: no tensor has a batch dimension.
    """
    learn_forms(batch)
    leaves = [
        (path, leaf)
        for path, leaf in pytree.tree_flatten_with_path(batch)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    if isinstance(batch_dim, BatchDims):
        return _checked(batch_dim, leaves)
    _check_form(batch_dim, batch, "")
    told = [_told(batch_dim, path) for path, _ in leaves]
    found = [_placed(*item, path, leaf) for item, (path, leaf) in zip(told, leaves, strict=True)]
    in_order = sorted(range(len(leaves)), key=lambda i: not told[i][1])
    rows = next((leaves[i][1].shape[d] for i in in_order if (d := found[i]) is not None), None)
    if rows is None:
        raise TraceError("the batch holds no tensor with a batch dimension")
    dims: list[int | None] = []
    for dim, (_, is_own), (path, leaf) in zip(found, told, leaves, strict=True):
        if dim is not None and leaf.shape[dim] != rows and is_own:
            raise ValueError(
                f"{pytree.keystr(path) or 'the batch'} of shape {tuple(leaf.shape)} has "
                f"{leaf.shape[dim]} rows in its batch dimension {dim}, another input has {rows}: "
                "correct batch_dim, or tell None for an input without a batch"
            )
        dims.append(dim if dim is not None and leaf.shape[dim] == rows else None)
    return BatchDims(dims)


def _checked(dims: BatchDims, leaves: Sequence[tuple[Any, torch.Tensor]]) -> BatchDims:
    if len(dims) != len(leaves):
        raise ValueError(
            f"the batch has {len(leaves)} tensors, batch dimensions are known for {len(dims)}: "
            "give the model and the form of batch that the plan was made for"
        )
    for dim, (path, leaf) in zip(dims, leaves, strict=True):
        if dim is not None:
            _placed(dim, True, path, leaf)
    return dims


def _check_form(told: Any, batch: Any, where: str) -> None:
    """Check that `told` is an int, None, or has the form of `batch`."""
    if told is None or (isinstance(told, int) and not isinstance(told, bool)):
        return
    name = f"batch_dim{where}"
    if isinstance(told, Mapping):
        parts = parts_of(batch)
        keys = list(parts)
        for key, value in told.items():
            if key not in keys:
                has = ", ".join(map(repr, keys)) or "no keys"
                raise ValueError(f"{name} tells {key!r}, which the batch lacks; it has {has}")
            _check_form(value, parts[key], f"{where}[{key!r}]")
    elif isinstance(told, (tuple, list)):
        count = len(batch) if type(batch) in (tuple, list) else 0
        if count != len(told):
            raise ValueError(
                f"{name} tells {len(told)} parts, the batch has {count or 'no parts'} there: give "
                "one int or None for each, or one int for all"
            )
        for index, value in enumerate(told):
            _check_form(value, batch[index], f"{where}[{index}]")
    else:
        raise ValueError(
            f"{name} is {told!r}: it must be an int, None for no batch, or a mapping or tuple of "
            "those of the form of the batch"
        )


def _told(batch_dim: Any, path: Sequence[Any]) -> tuple[int | None, bool]:
    """Return the dimension told for a leaf, and whether it is told for it alone."""
    told, is_own = batch_dim, False
    for entry in path:
        if isinstance(told, Mapping):
            key = entry.name if isinstance(entry, pytree.GetAttrKey) else entry.key
            is_own = key in told
            told = told.get(key, 0)
        elif isinstance(told, (tuple, list)):
            told, is_own = told[entry.idx], True
    return told, is_own


def _placed(dim: int | None, is_own: bool, path: Any, leaf: torch.Tensor) -> int | None:
    """Return a dimension counted from the front; None where the leaf has none by default."""
    if dim is None or (leaf.dim() == 0 and not is_own):
        return None
    if not -leaf.dim() <= dim < leaf.dim():
        raise ValueError(
            f"{pytree.keystr(path) or 'the batch'} of shape {tuple(leaf.shape)} has no dimension "
            f"{dim}: tell the batch dimension of each input, as in batch_dim={{'x': 1, 'y': 0}} or "
            "batch_dim=(1, 0), and None for an input without a batch"
        )
    return dim % leaf.dim()


def batch_rows(batch: Any, batch_dim: Any = 0) -> int:
    """Return the size of the batch dimension; see `batch_dims` for arguments and errors."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    dims = batch_dims(batch, batch_dim)
    sizes = (x.shape[dim] for x, dim in zip(leaves, dims, strict=True) if dim is not None)
    return int(next(sizes))


def microbatch_like(batch: Any, rows: int, batch_dim: Any = 0) -> Any:
    """Return meta tensors like `batch` with `rows` in the batch dimension; each one distinct."""
    dims = iter(batch_dims(batch, batch_dim))

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        dim = next(dims)
        if dim is not None:
            shape[dim] = rows
        return torch.empty(shape, dtype=leaf.dtype, device="meta")

    return pytree.tree_map(resize, batch)
