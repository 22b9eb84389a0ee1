"""Turn a block graph and a choice of axes into the graph that one tensor-parallel rank runs.

The lowered graph has the same ops with local sizes, and explicit ops for every change of placement:
one per (value, required placement), named `<value>__<placement>` and shared by all readers.
Parameters enter as the rank stores them; inputs and outputs of the block are whole, or, where the
plan says so, activations are slices of tokens or features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from autoplan.axis_labels import arguments, op_name
from autoplan.collectives import Redistribute, local_shape, placement_word
from autoplan.graph import Placement, ShardOption
from autoplan.op_facts import is_random
from autoplan.program import BlockGraph, Op, Ref, TensorMeta
from autoplan.sharded_ops import (
    QueryHeadAttention,
    RowAddmm,
    RowLinear,
    ShardedRandom,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
)
from autoplan.sharding import check_axes, chosen_options, layout_parameters
from autoplan.tensor_layout import WHOLE_BORDERS, Border, Borders, leaving_placement

__all__ = ["LoweredBlock", "border_placement", "dtensor_placement", "fsdp_dim", "lower"]

_VIEWS = ("view", "reshape", "_unsafe_view")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredBlock:
    """What one rank runs of a block.

    Attributes:
        graph: with local shapes and explicit redistribution ops.
        parameters: placement in which every state is stored, by FQN.
        inputs: placement of every input, by name.
        outputs: placement of every output, by its name in `graph`.
        leaving: those placements in the order of the outputs.
    """

    graph: BlockGraph
    parameters: dict[str, str]
    inputs: dict[str, str]
    outputs: dict[str, str]
    leaving: tuple[str, ...]


def lower(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
    *,
    degree: int,
    rank: int,
    group: dist.ProcessGroup | None,
    borders: Borders = WHOLE_BORDERS,
) -> LoweredBlock:
    """Return the local form of a block graph for one rank.

    Args:
        graph: as captured.
        options: `shard_options(graph)`.
        axes: op name -> axis; ops that are missing run whole.
        degree: number of tensor-parallel ranks.
        rank: of this process among them.
        group: their process group; None is the default group.
        borders: how activations enter and leave, where they can be sliced so.

    Raises:
        ValueError: the choice cannot run over `degree` ranks; see `check_axes`.
    """
    check_axes(graph, options, axes, degree)
    if not 0 <= rank < degree:
        raise ValueError(f"rank is {rank}; with degree {degree} it must be 0 to {degree - 1}")
    stored = layout_parameters(graph, options, axes)
    metas = dict(zip(graph.inputs, graph.input_metas, strict=True))
    metas |= {op.name: op.meta for op in graph.ops}
    entering, leaving = (
        {name: border_placement(metas.get(name), degree, border) for name in names}
        for names, border in zip((graph.inputs, graph.outputs), borders, strict=True)
    )
    if degree == 1:
        stored = dict.fromkeys(stored, "R")
        lowered, outputs = graph, graph.outputs
    else:
        lowering = _Lowering(graph, stored, entering, degree, rank, group)
        chosen = chosen_options(graph, options, axes)
        for op in graph.ops:
            lowering.add(op, chosen[op.name])
        outputs = tuple(
            lowering.convert(name, Placement.parse(leaving[name])) for name in graph.outputs
        )
        lowered = lowering.finish(outputs, axes)
    return LoweredBlock(
        graph=lowered,
        parameters=stored,
        inputs=entering,
        outputs={local: leaving[name] for local, name in zip(outputs, graph.outputs, strict=True)},
        leaving=tuple(leaving[name] for name in graph.outputs),
    )


def border_placement(meta: TensorMeta | None, degree: int, border: Border) -> str:
    """Return the placement in which a value crosses borders of blocks."""
    if meta is None or not meta.requires_grad:
        return "R"
    return leaving_placement(tuple(meta.shape), degree, border)


class _Lowering:
    """The lowered ops so far, and in which placements and under which names values exist."""

    def __init__(
        self,
        graph: BlockGraph,
        stored: Mapping[str, str],
        entering: Mapping[str, str],
        degree: int,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.graph = graph
        self.degree, self.rank, self.group = degree, rank, group
        self.stored = {s.name: Placement.parse(stored[s.fqn]) for s in graph.states}
        self.placements: dict[str, Placement] = {
            name: Placement.parse(entering[name]) for name in graph.inputs
        } | self.stored
        self.metas: dict[str, TensorMeta | None] = dict(
            zip(graph.inputs, graph.input_metas, strict=True)
        )
        self.metas |= {s.name: s.meta for s in graph.states}
        self.ops: list[Op] = []
        self.converted: dict[tuple[str, Placement], str] = {}
        self.written: dict[str, str] = {}

    def convert(self, value: str, required: Placement) -> str:
        """Return the name of `value` in the required placement; adds the op that makes it."""
        value = self.written.get(value, value)
        produced = self.placements[value]
        if produced == required:
            return value
        key = (value, required)
        if key not in self.converted:
            meta = self.metas[value]
            op = Op(
                name=f"{value}__{placement_word(required)}",
                target=Redistribute(
                    produced=produced,
                    required=required,
                    rank=self.rank,
                    degree=self.degree,
                    group=self.group,
                ),
                args=(Ref(value),),
                kwargs={},
                fqn="",
                line="",
                meta=self._local_meta(meta, required),
            )
            self.ops.append(op)
            self.converted[key] = op.name
        return self.converted[key]

    def add(self, op: Op, option: ShardOption) -> None:
        """Add the local form of an op, after what it needs."""
        names = {
            value: self.convert(value, Placement.parse(text))
            for value, text in zip(op.inputs(), option.inputs, strict=True)
        }
        first = op.inputs()[0] if op.inputs() else ""
        if _writes_first(op) and names[first] != first:
            names[first] = self._own_copy(names[first])
        local = self._local_op(op, option)
        self.placements[op.name] = Placement.parse(option.output)
        self.metas[op.name] = op.meta
        self.ops.append(
            replace(
                local.reading(names.__getitem__),
                meta=self._local_meta(op.meta, self.placements[op.name]),
            )
        )
        if _writes_first(op):
            self.converted = {k: v for k, v in self.converted.items() if k[0] != first}
            if names[first] != first:
                # Only the redistributed copy was written: later readers take the result.
                self.written[first] = op.name

    def _own_copy(self, value: str) -> str:
        """Add a copy of a redistributed value to write to: a slice may be a view of the whole."""
        made = next(op for op in self.ops if op.name == value)
        name = f"{value}__own"
        clone = torch.ops.aten.clone.default
        self.ops.append(replace(made, name=name, target=clone, args=(Ref(value),)))
        return name

    def finish(self, outputs: tuple[str, ...], axes: Mapping[str, str]) -> BlockGraph:
        """Return the lowered graph."""
        states = tuple(
            replace(s, meta=self._local_meta(s.meta, self.stored[s.name]) or s.meta)
            for s in self.graph.states
        )
        entering = [str(self.placements[name]) for name in self.graph.inputs]
        text = f"{self.graph.fingerprint} {sorted(axes.items())} {self.degree} {self.rank}"
        text += f" {entering} {outputs}"
        return replace(
            self.graph,
            states=states,
            input_metas=tuple(
                self._local_meta(meta, self.placements[name])
                for name, meta in zip(self.graph.inputs, self.graph.input_metas, strict=True)
            ),
            ops=tuple(self.ops),
            outputs=outputs,
            fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        )

    def _local_op(self, op: Op, option: ShardOption) -> Op:
        """Return the op with local sizes, and with its sharded form where it needs one."""
        name, random = op_name(op), is_random(op)
        output = Placement.parse(option.output)
        if name in _VIEWS:
            # A redistributed value is contiguous, in other strides than the view was captured for;
            # where a view is possible, reshape is one.
            sizes = _divided(op.args[1], output, self.degree)
            return replace(op, target=torch.ops.aten.reshape.default, args=(op.args[0], sizes))
        if not option.is_split:
            return op
        if name == "expand":
            return replace(
                op, args=(op.args[0], _divided(op.args[1], output, self.degree), *op.args[2:])
            )
        if name == "unflatten":
            rank_before = _positive(op.args[1], op, len(op.args[2]))
            inner = replace(output, dim=output.dim - rank_before)
            return replace(op, args=(*op.args[:2], _divided(op.args[2], inner, self.degree)))
        if name in ("split", "split_with_sizes"):
            source = self.metas[op.inputs()[0]]
            return _local_split(op, output, self.degree, len(source.shape) if source else 0)
        if option.axis == "query_heads":
            op = replace(op, target=QueryHeadAttention(op.target, self.rank, self.degree))
        if random:
            return replace(op, target=ShardedRandom(op.target, self.rank))
        if option.output == "P" and name == "linear" and arguments(op)["bias"] is not None:
            return replace(op, target=RowLinear(self.rank))
        if option.output == "P" and name == "addmm":
            return replace(op, target=RowAddmm(self.rank), kwargs={})
        if option.output == "P" and name == "embedding":
            return replace(op, target=VocabularyEmbedding(self.rank))
        if name == "cross_entropy_loss":
            dtype = op.meta.dtype if op.meta is not None else None
            return replace(op, target=VocabularyCrossEntropy(self.rank, self.group, dtype))
        return op

    def _local_meta(self, meta: TensorMeta | None, placement: Placement) -> TensorMeta | None:
        if meta is None:
            return None
        return replace(meta, shape=local_shape(meta.shape, placement, self.degree))


def _writes_first(op: Op) -> bool:
    if not isinstance(op.target, torch._ops.OpOverload) or not op.inputs():
        return False
    alias = op.target._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def _positive(dim: int, op: Op, num_sizes: int) -> int:
    assert op.meta is not None
    return dim if dim >= 0 else dim + len(op.meta.shape) - num_sizes + 1


def _divided(sizes: Any, placement: Placement, degree: int) -> list[int]:
    """Return the size arguments of a view for one rank; -1 stays."""
    return [
        size // degree
        if placement.kind == "shard" and dim == placement.dim and size != -1
        else size
        for dim, size in enumerate(sizes)
    ]


def _local_split(op: Op, output: Placement, degree: int, num_dims: int) -> Op:
    dim = op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)
    sizes = op.args[1]
    if output.kind != "shard" or dim % num_dims != output.dim:
        return op
    local = [n // degree for n in sizes] if isinstance(sizes, (list, tuple)) else sizes // degree
    return replace(op, args=(op.args[0], local, *op.args[2:]))


def dtensor_placement(placement: Placement) -> DTensorPlacement:
    """Return the DTensor placement in which a parameter is stored over the tp mesh.

    Several pieces are a `_StridedShard`, which keeps the checkpoint's order. torch 2.13 distributes
    a tensor by it; 2.11 refuses (`use_strided_shard_as_shard_order is True`).
    """
    if placement.kind != "shard":
        return Replicate()
    if placement.outer == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.outer)


def fsdp_dim(placement: Placement) -> int:
    """Return the dimension that FSDP2 must shard of a parameter stored in `placement`.

    FSDP2 on the dimension of a strided shard gives wrong full tensors without an error.
    """
    return 1 if placement.kind == "shard" and placement.outer > 1 and placement.dim == 0 else 0
