"""A block graph with the same ops on smaller tensors, so that a layout of it can be run at once.

Every logical axis (`autoplan.axes`) gets a small size of its own, the same wherever it stands, so
products, views and fused projections stay consistent. Axes that are cut from another (slices,
concatenations) shrink by one factor with it. Sizes keep what they share with the degree, so what
could be sliced still can. Shapes are inferred again op by op on the meta device; where an op does
not give what its axes say, its axes keep their sizes and the rest is tried again, at the worst
until nothing is smaller.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from autoplan.autocast import bare
from autoplan.axes import Analysis, Dim, leaves
from autoplan.axis_labels import arguments, op_name
from autoplan.axis_rules import analyse
from autoplan.axis_sizes import AxisSizes
from autoplan.dimension_rules import MORE_RULES
from autoplan.graph import Placement, ShardOption
from autoplan.program import BlockGraph, Op, TensorMeta, map_refs

__all__ = ["SmallGraph", "axes_of", "shrink_graph"]

Options = Mapping[str, tuple[ShardOption, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallGraph:
    """A smaller form of a block graph, with its ops by the same names.

    Attributes:
        graph: with small sizes.
        options: of its ops: those of the block, with small sizes.
    """

    graph: BlockGraph
    options: dict[str, tuple[ShardOption, ...]]


def axes_of(graph: BlockGraph) -> Analysis:
    """Return the logical axes by which a graph, or ops of it, can be made smaller."""
    return analyse(replace(graph, ops=tuple(bare(op) for op in graph.ops)), MORE_RULES)


def shrink_graph(
    graph: BlockGraph, options: Options, degree: int, found: Analysis, alignment: int = 1
) -> SmallGraph:
    """Return a graph as small as its axes allow; the graph itself where they allow nothing.

    Args:
        graph: a block graph, or some ops of one.
        options: of its ops.
        degree: ranks; an axis that they divide stays one that they divide.
        found: `axes_of` the whole block graph.
        alignment: what a small size on each rank should be a multiple of.
    """
    sizes = AxisSizes(graph, found, degree * alignment)
    while not sizes.is_hopeless:
        sizes.assign()
        small = _infer(graph, found, sizes)
        if small is None:
            continue
        try:
            told = {
                op.name: tuple(_small_option(op, o, found, sizes) for o in options[op.name])
                for op in graph.ops
            }
        except _Different as different:
            sizes.keep([different.dim])
            continue
        return SmallGraph(graph=small, options=told)
    return SmallGraph(graph=graph, options=dict(options))


class _Different(Exception):
    """A dimension does not have the axes that an option slices, and must keep its size."""

    def __init__(self, dim: Dim) -> None:
        super().__init__()
        self.dim = dim


def _infer(graph: BlockGraph, found: Analysis, sizes: AxisSizes) -> BlockGraph | None:
    """Return the graph with small sizes, or None: then `sizes` has become stricter."""
    values: dict[str, Any] = {}
    metas: dict[str, TensorMeta | None] = {}
    given = [*zip(graph.inputs, graph.input_metas, strict=True)]
    for name, meta in [*given, *((s.name, s.meta) for s in graph.states)]:
        if meta is not None:
            shape = sizes.shape(found.dims[name])
            metas[name] = replace(meta, shape=shape)
            values[name] = torch.empty(shape, dtype=meta.dtype, device="meta")
    ops = []
    for op in graph.ops:
        try:
            small = _small_op(op, found, sizes)
            values[op.name] = _run(op, small, values, graph)
        except Exception:  # whatever an operator raises of shapes that do not fit
            sizes.blame(op, found)
            return None
        if not _has_shape(values[op.name], op, found, sizes):
            sizes.blame(op, found)
            return None
        result = values[op.name]
        meta = op.meta
        if meta is not None:
            meta = replace(meta, shape=tuple(result.shape))
        ops.append(replace(small, meta=meta))
    return replace(
        graph,
        input_metas=tuple(metas.get(name) for name in graph.inputs),
        states=tuple(replace(s, meta=metas[s.name] or s.meta) for s in graph.states),
        ops=tuple(ops),
        fingerprint=f"{graph.fingerprint} small",
    )


def _run(op: Op, small: Op, values: Mapping[str, Any], graph: BlockGraph) -> Any:
    """Return the result of a small op on the meta device; an op as it was is not run."""
    is_same = all(_is_as_captured(values[name], graph.meta(name)) for name in op.inputs())
    if is_same and op.meta is not None and op.target is not operator.getitem:
        return torch.empty(op.meta.shape, dtype=op.meta.dtype, device="meta")

    def on_meta(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device) else value

    args = map_refs(small.args, values.__getitem__)
    kwargs = {k: on_meta(v) for k, v in map_refs(dict(small.kwargs), values.__getitem__).items()}
    return bare(small).target(*map(on_meta, args), **kwargs)


def _is_as_captured(value: Any, meta: TensorMeta | None) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and meta is not None
    return is_tensor and tuple(value.shape) == tuple(meta.shape)  # type: ignore[union-attr]


def _has_shape(value: Any, op: Op, found: Analysis, sizes: AxisSizes) -> bool:
    """Return whether a result is what the axes of the op say."""
    if op.name in found.dims:
        return tuple(value.shape) == sizes.shape(found.dims[op.name])
    if op.name in found.tuples:
        shapes = [sizes.shape(dims) for dims in found.tuples[op.name]]
        return [tuple(x.shape) for x in value] == shapes
    return True


def _small_op(op: Op, found: Analysis, sizes: AxisSizes) -> Op:
    """Return an op with the sizes in its arguments made small."""
    inner = bare(op)
    if not isinstance(inner.target, torch._ops.OpOverload):
        return op
    told = arguments(inner)
    small = dict(told)
    dims = found.dims.get(op.name)
    shape = sizes.shape(dims) if dims is not None else ()
    name = op_name(inner)
    if op.meta is not None:
        for key in ("size", "shape"):
            if isinstance(told.get(key), (list, tuple)):
                small[key] = _small_shape(told[key], op.meta.shape, shape)
    if name == "unflatten":
        at = told["dim"] % (len(shape) - len(told["sizes"]) + 1)
        own = slice(at, at + len(told["sizes"]))
        small["sizes"] = _small_shape(told["sizes"], told["sizes"], shape[own])
    elif name in ("layer_norm", "rms_norm"):
        small["normalized_shape"] = list(shape[len(shape) - len(told["normalized_shape"]) :])
    elif name in ("split", "split_with_sizes") and op.name in found.tuples:
        small |= _small_split(told, found.tuples[op.name], sizes)
    elif name == "slice":
        source = found.dims[op.inputs()[0]][told["dim"] % len(shape)]
        before = prod(atom.size for atom in leaves(source))
        small |= _small_range(told, before, sizes.extent(source), shape[told["dim"] % len(shape)])
    elif name == "arange" and isinstance(told.get("end"), int):
        start, step = told.get("start", 0), told.get("step", 1)
        small["end"] = start + shape[0] * step
    return replace(op, **_replaced(op, told, small))


def _small_shape(
    sizes: Sequence[int], captured: Sequence[int], small: Sequence[int]
) -> Sequence[int]:
    """Return the sizes of a view or factory; -1 stays."""
    if len(sizes) != len(captured) or len(sizes) != len(small):
        return sizes
    return [own if own == -1 else new for own, new in zip(sizes, small, strict=True)]


def _small_split(
    told: Mapping[str, Any], parts: Sequence[Sequence[Dim]], sizes: AxisSizes
) -> dict[str, Any]:
    dim = told["dim"] % len(parts[0])
    extents = [sizes.extent(part[dim]) for part in parts]
    for key in ("split_size", "split_sizes"):
        if key in told:
            return {key: extents if isinstance(told[key], (list, tuple)) else extents[0]}
    return {}


def _small_range(
    told: Mapping[str, Any], before: int, after: int, length: int
) -> dict[str, int | None]:
    """Return start and end of a slice of `length` that lies in `after` as it lay in `before`."""
    step = told["step"]
    start, end, _ = slice(told["start"], told["end"], step).indices(before)
    need = (length - 1) * step + 1
    from_end = after - (before - start)
    candidates = [start] if start < step else []
    candidates += [start * after // before] if start * after % before == 0 else []
    candidates += [from_end] if end == before else []
    for candidate in [*candidates, start]:
        if candidate >= 0 and candidate + need <= after:
            is_rest = end == before and candidate + length * step >= after
            return {"start": candidate, "end": after if is_rest else candidate + need}
    return {}


def _replaced(op: Op, told: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an op in which those that differ are replaced."""
    target = bare(op).target
    assert isinstance(target, torch._ops.OpOverload)
    args, kwargs = list(op.args), dict(op.kwargs)
    for index, argument in enumerate(target._schema.arguments):
        if small[argument.name] is told[argument.name]:
            continue
        if index < len(args):
            args[index] = small[argument.name]
        else:
            kwargs[argument.name] = small[argument.name]
    return {"args": tuple(args), "kwargs": kwargs}


def _small_option(op: Op, option: ShardOption, found: Analysis, sizes: AxisSizes) -> ShardOption:
    """Return an option of an op for its small sizes: pieces of slices, and the axis' extent."""
    if option.axis in ("whole", "partial"):
        return option
    extents = []

    def small(name: str, text: str) -> str:
        placement = Placement.parse(text)
        if placement.kind != "shard":
            return text
        dim = found.result(name)[placement.dim]
        if sizes.is_kept(dim):
            extents.append(option.size)
            return text
        outer, rest = _prefix(dim, placement.outer)
        size, _ = _prefix(rest, option.size)
        extents.append(sizes.extent(size))
        return str(replace(placement, outer=sizes.extent(outer)))

    inputs = [small(n, text) for n, text in zip(op.inputs(), option.inputs, strict=True)]
    output = small(op.name, option.output)
    return ShardOption(
        axis=option.axis,
        size=min(extents, default=option.size),
        inputs=tuple(inputs),
        output=output,
        is_split=option.is_split,
        gemm_dim=option.gemm_dim,
    )


def _prefix(dim: Dim, size: int) -> tuple[Dim, Dim]:
    """Return the leading axes of product `size`, and those that follow."""
    atoms, seen = leaves(dim), 1
    for index, atom in enumerate(atoms):
        if seen == size:
            return atoms[:index], atoms[index:]
        seen *= atom.size
    if seen != size:
        raise _Different(dim)
    return atoms, []
