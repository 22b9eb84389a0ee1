"""The captured program of a model and its loss: a chain of calls of a few block graphs.

    Program = inputs, side ops, calls (in execution order), loss
    call    = which block graph, on which module (FQN), with which values

Values are named. A block graph has names of its own; a call binds them to the program's names. Side
ops (masks, positions, rotary tables, label shifts) depend on batch inputs and buffers only, never
on a parameter: every pipeline stage runs those that it needs. This module holds torch objects; the
numbers that the planner reads are in `autoplan.graph`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = [
    "BlockGraph",
    "Call",
    "Op",
    "Program",
    "Ref",
    "State",
    "TensorMeta",
    "map_refs",
    "refs",
    "text_hash",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by its name, as it stands in the arguments of an op."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and whether a gradient flows; what is known of a tensor without running."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of a contiguous tensor like this."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of an operator.

    Attributes:
        name: the name of its result; unique in its graph.
        target: the operator, such as `torch.ops.aten.linear.default` or `operator.getitem`.
        args: positional arguments; values stand as `Ref`, in nested lists and tuples too.
        kwargs: keyword arguments, likewise.
        fqn: the module whose forward made the call, relative to the block; empty for the block.
        line: `file:line` of the user's code, or empty.
        meta: of the result; None where it is not one tensor (a tuple, read by `getitem`).
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fqn: str
    line: str
    meta: TensorMeta | None
    _inputs: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def target_name(self) -> str:
        """Return the stable text form of the operator: `aten.linear.default`, `getitem`."""
        if isinstance(self.target, torch._ops.OpOverload):
            return str(self.target)
        return getattr(self.target, "__name__", str(self.target))

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values it reads, each once, in order of appearance."""
        if self._inputs is None:  # asked for very often while a model is traced
            found = tuple(dict.fromkeys(refs((self.args, self.kwargs))))
            object.__setattr__(self, "_inputs", found)
            return found
        return self._inputs

    def reading(self, rename: Callable[[str], str]) -> Op:
        """Return the call with other names of the values that it reads."""

        def renamed(name: str) -> Ref:
            return Ref(rename(name))

        args, kwargs = map_refs(self.args, renamed), map_refs(dict(self.kwargs), renamed)
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A parameter or buffer that a block graph reads.

    Attributes:
        name: the value's name in the block graph.
        fqn: relative to the call's FQN for a block, absolute (with `is_absolute`) otherwise.
        is_parameter: parameter, else buffer or constant.
        meta: shape, dtype, and whether it is trained.
    """

    name: str
    fqn: str
    is_absolute: bool
    is_parameter: bool
    meta: TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """The executable form of a block class: every call of the class runs these ops.

    Attributes:
        name: `block0`, `block1`, ... or `glue0`, ... for what stands between blocks.
        is_glue: whether it is embeddings, head, loss or the like and no block of a repeated list.
        inputs: names and metas of the values that enter.
        states: the parameters and buffers it reads.
        ops: in execution order.
        outputs: names of the values that leave.
        fingerprint: hash of structure, constants, shapes, dtypes and state names.
    """

    name: str
    is_glue: bool
    inputs: tuple[str, ...]
    input_metas: tuple[TensorMeta | None, ...]
    states: tuple[State, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    fingerprint: str

    def meta(self, name: str) -> TensorMeta | None:
        """Return the meta of a value by its name in this graph."""
        for candidate, meta in zip(self.inputs, self.input_metas, strict=True):
            if candidate == name:
                return meta
        for state in self.states:
            if state.name == name:
                return state.meta
        for op in self.ops:
            if op.name == name:
                return op.meta
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a block graph on a module of the user's.

    Attributes:
        graph: index into `Program.graphs`.
        fqn: FQN of the block's module; empty for glue.
        args: program values bound to the graph's `inputs`.
        outs: program values bound to the graph's `outputs`.
        states: absolute FQNs bound to the graph's `states`.
    """

    graph: int
    fqn: str
    args: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model with its loss, captured for one micro-batch size.

    Attributes:
        inputs: names of the tensor leaves of the batch, in pytree order.
        input_metas: of those leaves.
        input_keys: readable paths of those leaves in the batch, such as `['input_ids']`.
        graphs: the block graphs.
        calls: in execution order.
        side_ops: ops on batch inputs and buffers only, in execution order, with program names.
        side_states: states that side ops read: program value name -> absolute FQN.
        constants: tensors baked into the program: program value name -> tensor.
        loss: program value of the scalar loss.
        aliases: parameter FQN -> the first FQN of the same tensor (itself when not shared).
        microbatch_size: size of the batch dimension of the batch inputs at capture.
        metas: of every program value (inputs, constants, side states, side ops, call outputs).
        autocast: dtype of the autocast around the step at capture, or None.
        batch_dims: per input its batch dimension, None for an input without a batch.
        notes: what a reader must know (checkpointing inside the model, caches switched off).
    """

    inputs: tuple[str, ...]
    input_metas: tuple[TensorMeta, ...]
    input_keys: tuple[str, ...]
    graphs: tuple[BlockGraph, ...]
    calls: tuple[Call, ...]
    side_ops: tuple[Op, ...]
    side_states: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    loss: str
    aliases: Mapping[str, str]
    microbatch_size: int
    metas: Mapping[str, TensorMeta] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    batch_dims: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return the hash of the whole program: graphs, order of calls, names, side ops."""
        parts = [repr([(c.graph, c.fqn, c.args, c.outs, c.states) for c in self.calls])]
        parts += [graph.fingerprint for graph in self.graphs]
        parts += [f"{op.name}={op.target_name}{op.args}{dict(op.kwargs)}" for op in self.side_ops]
        parts += [repr((self.inputs, self.input_metas, self.loss, sorted(self.aliases.items())))]
        parts += [str(self.autocast)] if self.autocast is not None else []
        return text_hash(parts)


def text_hash(lines: Sequence[str]) -> str:
    """Return a short hash of lines of text; addresses of objects in them are left out."""
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def map_refs(value: Any, function: Callable[[str], Any]) -> Any:
    """Return `value` with every `Ref` in it replaced by `function(name)`."""
    if isinstance(value, Ref):
        return function(value.name)
    if isinstance(value, tuple):
        return tuple(map_refs(item, function) for item in value)
    if isinstance(value, list):
        return [map_refs(item, function) for item in value]
    if isinstance(value, Mapping):
        return {key: map_refs(item, function) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_refs(x, function) for x in (value.start, value.stop, value.step)))
    return value


def refs(value: Any) -> Iterator[str]:
    """Yield the names of all values that stand in `value`, in order, repeats included."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, slice):
        yield from refs((value.start, value.stop, value.step))
