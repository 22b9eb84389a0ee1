"""Capture a model and its loss as a `Program`, on the meta device, without touching the model.

The model is copied with every tensor replaced by a meta tensor, so neither weights nor random state
are read or changed. Long runs of equal blocks are shortened before `torch.export` and put back as
calls afterwards, so the time does not grow with depth.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan import hf
from autoplan.errors import TraceError
from autoplan.program import Op, Program, Ref, TensorMeta
from autoplan.segments import FlatProgram, NotAChain, build_program
from autoplan.shortening import Shortening, shorten

__all__ = ["capture", "meta_copy", "microbatch_like", "split_batch"]

LossFn = Callable[..., torch.Tensor]


def capture(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    microbatch_size: int | None = None,
    full_depth: bool = False,
) -> Program:
    """Return the program of `model` and its loss for one micro-batch.

    Args:
        model: any module, on any device, `meta` too; it is left as it is.
        batch: example input. A mapping is passed by keyword (keys that `forward` does not take are
            left to `loss_fn`), a tuple by position (its last element is the target if `loss_fn`
            takes two arguments), anything else as the only argument. Dimension 0 of every tensor
            whose first size equals that of the first tensor is the batch dimension.
        loss_fn: `loss_fn(output)` or `loss_fn(output, target)`; for a mapping the target is the
            whole mapping. None: the output is the loss, or has it as `.loss`.
        microbatch_size: rows to capture; None takes the batch as it is.
        full_depth: export every block instead of two of each run of equal blocks.

    Raises:
        TraceError: the model could not be exported, or has no scalar loss; names module and line.
    """
    rows = microbatch_size if microbatch_size is not None else batch_rows(batch)
    example = microbatch_like(batch, rows)
    if full_depth:
        return _capture_once(model, example, loss_fn, rows, None)
    copied = meta_copy(model)
    shortening = shorten(copied)
    if not shortening.runs:
        return _capture_once(model, example, loss_fn, rows, None, copied)
    try:
        return _capture_once(model, example, loss_fn, rows, shortening, copied)
    except (TraceError, NotAChain):
        return _capture_once(model, example, loss_fn, rows, None)


def _capture_once(
    model: nn.Module,
    example: Any,
    loss_fn: LossFn | None,
    rows: int,
    shortening: Shortening | None,
    copied: nn.Module | None = None,
) -> Program:
    copied = meta_copy(model) if copied is None else copied
    copied.train(model.training)
    hf.prepare(copied, example)
    leaves, spec = pytree.tree_flatten(example)
    tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    wrapper = _LossModule(copied, loss_fn, spec, leaves, tensor_at)
    tensors = tuple(leaves[i] for i in tensor_at)
    exported = _export(wrapper, tensors)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(example)[0]]
    flat = _flatten(exported, [keys[i] for i in tensor_at])
    return build_program(flat, copied, shortening, rows)


class _LossModule(nn.Module):
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


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a structural copy of `model` on the meta device: ties are kept, no weight is read."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(f"{type(model).__name__} cannot be copied: {error}") from error


def _export(wrapper: nn.Module, tensors: tuple[torch.Tensor, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(wrapper, tensors, strict=False)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_explain(error)) from error


def _explain(error: Exception) -> str:
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    return f"torch.export could not capture the model: {type(error).__name__}: {reason}"


_SKIPPED = ("aten._assert_tensor_metadata.default", "aten._assert_async.msg")
_NO_OP_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")


def _flatten(exported: Any, keys: Sequence[str]) -> FlatProgram:
    """Return the exported graph as ops; drops assertions, guards and casts that change nothing."""
    signature = exported.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = dict(signature.inputs_to_lifted_tensor_constants)
    alias: dict[str, str] = {}
    ops: list[Op] = []
    stacks: dict[str, tuple[tuple[str, str], ...]] = {}
    inputs: list[str] = []
    metas: dict[str, TensorMeta | None] = {}
    loss = ""
    trained = {n for n, p in exported.named_parameters() if p.requires_grad}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            fqn = states.get(node.name, "")
            metas[node.name] = _meta(node.meta.get("val"), fqn in trained)
            if node.name not in states and node.name not in lifted:
                inputs.append(node.name)
        elif node.op == "output":
            loss = alias.get(node.args[0][0].name, node.args[0][0].name)
        elif node.op == "call_function":
            _add_op(node, alias, ops, stacks, metas)
        else:
            raise TraceError(f"{node.op} {node.target}: not supported in an exported graph")
    used = {name for op in ops for name in op.inputs()}
    prefix = "model."
    return FlatProgram(
        inputs=tuple(inputs),
        input_metas=tuple(_required(metas[name]) for name in inputs),
        input_keys=tuple(keys),
        states={n: f.removeprefix(prefix) for n, f in states.items() if n in used},
        state_metas={n: _required(metas[n]) for n in states if n in used},
        parameters=frozenset(n for n in signature.inputs_to_parameters if n in used),
        constants={n: exported.constants[f] for n, f in lifted.items() if n in used},
        ops=tuple(ops),
        stacks=stacks,
        loss=loss,
    )


def _required(meta: TensorMeta | None) -> TensorMeta:
    assert meta is not None, "an exported input has no tensor meta"
    return meta


def _meta(value: Any, requires_grad: bool) -> TensorMeta | None:
    if not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in value.shape):
        raise TraceError(f"a shape depends on data: {tuple(value.shape)}; sizes must be fixed")
    return TensorMeta(tuple(value.shape), value.dtype, requires_grad)


def _add_op(
    node: Any,
    alias: dict[str, str],
    ops: list[Op],
    stacks: dict[str, tuple[tuple[str, str], ...]],
    metas: dict[str, TensorMeta | None],
) -> None:
    name = str(node.target)
    if name in _SKIPPED:
        return
    value = node.meta.get("val")
    if name in _NO_OP_CASTS and isinstance(node.args[0], torch.fx.Node):
        source = node.args[0]
        if source.meta["val"].dtype == value.dtype and not node.kwargs.get("copy", False):
            alias[node.name] = alias.get(source.name, source.name)
            metas[node.name] = metas.get(source.name)
            return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise TraceError(
            f"{_where(node)}: {name} (a nested graph, such as autocast inside forward) cannot be "
            "planned yet: put autocast around the training step instead of inside forward"
        )
    requires = [n.name for n in node.all_input_nodes]
    grad = any(m is not None and m.requires_grad for m in (metas.get(n) for n in requires))
    metas[node.name] = _meta(value, grad and _is_float(value))
    if isinstance(value, (tuple, list)):
        metas[node.name] = TensorMeta((), torch.float32, grad)
    ops.append(
        Op(
            name=node.name,
            target=node.target,
            args=_template(node.args, alias),
            kwargs=_template(dict(node.kwargs), alias),
            fqn="",
            line=_line(node),
            meta=metas[node.name] if isinstance(value, torch.Tensor) else None,
        )
    )
    stacks[node.name] = tuple(
        (key, path.removeprefix("model").removeprefix("."))
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()
        if path.startswith("model")
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _template(value: Any, alias: Mapping[str, str]) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(alias.get(value.name, value.name))
    if isinstance(value, (list, torch.fx.immutable_collections.immutable_list)):
        return [_template(item, alias) for item in value]
    if isinstance(value, tuple):
        return tuple(_template(item, alias) for item in value)
    if isinstance(value, Mapping):
        return {key: _template(item, alias) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_template(x, alias) for x in (value.start, value.stop, value.step)))
    return value


def _line(node: Any) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


def _where(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    fqn = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
    return f"{fqn or 'the model'} ({_line(node) or 'line unknown'})"
