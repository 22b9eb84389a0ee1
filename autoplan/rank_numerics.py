"""A layout of a block graph run on all of its ranks, and held against the whole graph.

Each rank is a thread that runs the lowered graph, forward and backward, in float64 on random
numbers. Outputs, input gradients and parameter gradients are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.autocast import bare
from autoplan.axis_labels import op_name, reference
from autoplan.collectives import join_slices, local_slice
from autoplan.executor import compile_graph
from autoplan.graph import Placement, ShardOption
from autoplan.lowering import LoweredBlock, lower
from autoplan.op_facts import is_random
from autoplan.program import BlockGraph, Op, TensorMeta
from autoplan.tensor_layout import WHOLE_BORDERS, Borders
from autoplan.thread_ranks import ThreadRanks

__all__ = ["Comparison", "compare_layout", "without_chance"]

_TOLERANCE = 1e-9
_COARSE_TOLERANCE = 1e-4  # of blocks that cast to a smaller dtype inside
_TIMEOUT_S = 60.0
_WHOLE = Placement(kind="replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a layout of a graph compares with the whole graph.

    Attributes:
        error: largest difference over the largest entry, of outputs and gradients; None: not run.
        reason: why it was not run or cannot be, or which tensor differs; empty where it is right.
        is_wrong: it cannot be run on slices, or differs.
    """

    error: float | None
    reason: str
    is_wrong: bool

    @classmethod
    def not_run(cls, reason: str) -> Comparison:
        """Return that nothing was compared, and why."""
        return cls(error=None, reason=f"not run: {reason}", is_wrong=False)


def without_chance(graph: BlockGraph) -> BlockGraph:
    """Return a graph without dropout, since ranks draw differently, and without autocast."""
    return replace(graph, ops=tuple(_without_dropout(bare(op)) for op in graph.ops))


def compare_layout(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
    degree: int,
    *,
    borders: Borders = WHOLE_BORDERS,
) -> Comparison:
    """Return how a layout compares with the whole graph, of which both are run.

    Args:
        graph: `without_chance`; its sizes are run as they are.
        options: of its ops.
        axes: op name -> axis.
        degree: ranks, one thread each.
        borders: how activations enter and leave, where they can be sliced so.
    """
    drawing = [op.name for op in graph.ops if is_random(op)]
    if drawing:
        return Comparison.not_run(f"{drawing[0]} draws random numbers")
    try:
        return _compare(_in_dtype(graph, torch.float64), options, axes, degree, borders)
    except _NotRun as error:  # some operators have no float64
        reason = str(error)
    try:
        return _compare(_in_dtype(graph, torch.float32), options, axes, degree, borders)
    except _NotRun:
        return Comparison.not_run(reason)


class _NotRun(Exception):
    """The whole graph gives no finite numbers."""


def _compare(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
    degree: int,
    borders: Borders,
) -> Comparison:
    values, expected = _whole_results(graph)
    ranks = ThreadRanks(degree, _TIMEOUT_S)
    try:
        blocks = [
            lower(
                graph,
                options,
                axes,
                degree=degree,
                rank=rank,
                group=ranks.member(rank),
                borders=borders,
            )
            for rank in range(degree)
        ]
        got = _run_ranks(graph, blocks, values, ranks)
    except Exception as error:  # whatever operators and rules raise
        reason = f"cannot be run: {type(error).__name__}: {error}"
        return Comparison(error=None, reason=reason, is_wrong=True)
    name, largest = _largest_error(expected, got)
    is_wrong = not largest <= (_COARSE_TOLERANCE if _is_coarse(graph) else _TOLERANCE)
    return Comparison(error=largest, reason=f"{name} differs" * is_wrong, is_wrong=is_wrong)


def _whole_results(graph: BlockGraph) -> tuple[_Values, dict[str, torch.Tensor]]:
    """Return random numbers and what the whole graph makes of them.

    Raises:
        _NotRun: an operator refuses the dtype or the numbers, or a result is infinite.
    """
    for is_positive in (False, True):
        values = _Values.random(graph, is_positive=is_positive)
        try:
            expected = _run_whole(graph, values)
        except Exception as error:  # whatever operators raise
            raise _NotRun(f"{type(error).__name__}: {error}") from None
        infinite = [name for name, x in expected.items() if not bool(x.isfinite().all())]
        if not infinite:
            return values, expected
    raise _NotRun(f"{infinite[0]} is not finite for random numbers")


def _largest_error(
    expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> tuple[str, float]:
    """Return the tensor that differs most, and by how much of its largest entry."""
    name, largest = "", 0.0
    scales = {k: float(x.abs().max()) if x.numel() else 0.0 for k, x in expected.items()}
    # A gradient that is nothing but rounding, as that of a bias of keys, is held against others.
    noise = 1e-3 * max(scales.values(), default=0.0)
    for key, tensor in expected.items():
        if key not in got:
            return key, math.inf
        scale = max(scales[key], noise)
        off = float((got[key] - tensor).abs().max()) if tensor.numel() else 0.0
        error = off / max(scale, 1e-6)
        if not error <= largest:
            name, largest = key, error
    return name, largest


def _without_dropout(op: Op) -> Op:
    """Return a dropout that drops nothing, and attention likewise; other ops as they are."""
    name = op_name(op)
    if name in ("dropout", "dropout_", "native_dropout"):
        return replace(op, target=torch.ops.aten.clone.default, args=op.args[:1], kwargs={})
    if name == "scaled_dot_product_attention":
        args = list(op.args)
        if len(args) > 4:
            args[4] = 0.0
        kwargs = {k: 0.0 if k == "dropout_p" else v for k, v in op.kwargs.items()}
        return replace(op, args=tuple(args), kwargs=kwargs)
    return op


def _in_dtype(graph: BlockGraph, dtype: torch.dtype) -> BlockGraph:
    """Return a graph in which all that is floating-point has one dtype."""

    def widen(value: Any) -> Any:
        is_float = isinstance(value, torch.dtype) and value.is_floating_point
        return dtype if is_float else value

    def meta(known: TensorMeta | None) -> TensorMeta | None:
        return replace(known, dtype=widen(known.dtype)) if known is not None else None

    ops = tuple(
        replace(
            op,
            args=tuple(widen(value) for value in op.args),
            kwargs={key: widen(value) for key, value in op.kwargs.items()},
            meta=meta(op.meta),
        )
        for op in graph.ops
    )
    return replace(
        graph,
        ops=ops,
        input_metas=tuple(meta(known) for known in graph.input_metas),
        states=tuple(replace(s, meta=meta(s.meta) or s.meta) for s in graph.states),
    )


def _is_coarse(graph: BlockGraph) -> bool:
    """Return whether a graph is rounded to less than float64, also by ops that do not tell."""
    metas = [*graph.input_metas, *(op.meta for op in graph.ops)]
    return any(meta is not None and meta.dtype == torch.float32 for meta in metas) or any(
        op.target_name.startswith(("opaque_", "aten.type_as")) for op in graph.ops
    )


@dataclass(frozen=True, slots=True)
class _Values:
    """Random inputs, states and gradients of a graph, whole."""

    inputs: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, graph: BlockGraph, *, is_positive: bool) -> _Values:
        generator = torch.Generator().manual_seed(0)
        bound = _smallest_table(graph)
        rows = _rows_of_groups(graph)

        def make(name: str, meta: TensorMeta | None) -> torch.Tensor:
            assert meta is not None, "an input is a tensor"
            if meta.dtype.is_floating_point:
                found = torch.randn(meta.shape, generator=generator, dtype=meta.dtype) * 0.5
                return found.abs() + 0.1 if is_positive else found
            if meta.dtype == torch.bool:
                return torch.ones(meta.shape, dtype=torch.bool)
            if name in rows:
                count = meta.shape[0]
                return torch.arange(1, count + 1, dtype=meta.dtype) * rows[name] // count
            return torch.randint(0, bound, meta.shape, generator=generator, dtype=meta.dtype)

        given = zip(graph.inputs, graph.input_metas, strict=True)
        inputs = tuple(make(name, meta) for name, meta in given)
        return cls(inputs, tuple(make(state.name, state.meta) for state in graph.states))


def _smallest_table(graph: BlockGraph) -> int:
    """Return a bound for integers: rows of the smallest table, columns of the smallest logits."""
    sizes = [2]
    found = []
    for op in graph.ops:
        name = op_name(op)
        if name in ("embedding", "index", "cross_entropy_loss", "nll_loss", "gather"):
            meta = graph.meta(op.inputs()[0])
            if meta is not None and meta.shape:
                found.append(meta.shape[0 if name in ("embedding", "index") else -1])
    return min(found) if found else sizes[0]


def _rows_of_groups(graph: BlockGraph) -> dict[str, int]:
    """Return the values that tell where groups of rows end, with the number of rows."""
    rows = {}
    for op in graph.ops:
        meta = graph.meta(op.inputs()[0]) if op_name(op) == "_grouped_mm" else None
        if meta is not None:
            ends = op.args[2] if len(op.args) > 2 else op.kwargs.get("offs")
            rows[reference(ends) or ""] = meta.shape[0]
    return rows


def _leaves(
    tensors: Sequence[torch.Tensor], metas: Sequence[TensorMeta | None]
) -> list[torch.Tensor]:
    """Return fresh copies that collect gradients where the captured values do."""
    copies = []
    for tensor, meta in zip(tensors, metas, strict=True):
        needs = tensor.is_floating_point() and meta is not None and meta.requires_grad
        copies.append(tensor.clone().requires_grad_(needs))
    return copies


def _backward(
    outputs: Sequence[Any],
    placements: Sequence[Placement] | None = None,
    rank: int = 0,
    degree: int = 1,
) -> None:
    """Run the backward with gradients that follow the place in the whole output."""
    own = placements or (_WHOLE,) * len(outputs)
    wanted, gradients = [], []
    for x, placement in zip(outputs, own, strict=True):
        if not (isinstance(x, torch.Tensor) and x.requires_grad):
            continue
        is_slice = placement.kind == "shard"
        shape = [
            n * (degree if is_slice and d == placement.dim else 1) for d, n in enumerate(x.shape)
        ]
        whole = torch.linspace(0.1, 1.0, math.prod(shape), dtype=x.dtype).reshape(shape)
        wanted.append(x)
        gradients.append(local_slice(whole, placement, rank, degree))
    if wanted:
        torch.autograd.backward(wanted, gradients)


def _run_whole(graph: BlockGraph, values: _Values) -> dict[str, torch.Tensor]:
    inputs = _leaves(values.inputs, graph.input_metas)
    states = _leaves(values.states, [s.meta for s in graph.states])
    outputs = compile_graph(graph, torch.device("cpu")).function(
        tuple(states), *[x.clone() for x in inputs]
    )
    _backward(outputs)
    return _results(graph, outputs, inputs, states)


def _results(
    graph: BlockGraph,
    outputs: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    found = {
        f"output {name}": x.detach().double()
        for name, x in zip(graph.outputs, outputs, strict=True)
        if isinstance(x, torch.Tensor)
    }
    named = [*zip(graph.inputs, inputs, strict=True)]
    named += [(s.fqn, x) for s, x in zip(graph.states, states, strict=True)]
    found |= {f"gradient of {name}": x.grad for name, x in named if x.grad is not None}
    return found


def _run_ranks(
    graph: BlockGraph, blocks: Sequence[LoweredBlock], values: _Values, ranks: ThreadRanks
) -> dict[str, torch.Tensor]:
    """Return what `_run_whole` returns, of the ranks together."""
    degree = len(blocks)
    placements = [Placement.parse(blocks[0].parameters[s.fqn]) for s in graph.states]
    entering = [Placement.parse(blocks[0].inputs[name]) for name in graph.inputs]
    leaving = [Placement.parse(text) for text in blocks[0].leaving]

    def run(rank: int) -> dict[str, torch.Tensor]:
        block = blocks[rank]
        slices = [
            local_slice(tensor, placement, rank, degree)
            for tensor, placement in zip(values.inputs, entering, strict=True)
        ]
        inputs = _leaves(slices, graph.input_metas)
        local = [
            local_slice(tensor, placement, rank, degree)
            for tensor, placement in zip(values.states, placements, strict=True)
        ]
        states = _leaves(local, [s.meta for s in graph.states])
        outputs = compile_graph(block.graph, torch.device("cpu")).function(
            tuple(states), *[x.clone() for x in inputs]
        )
        _backward(outputs, leaving, rank, degree)
        return _results(graph, outputs, inputs, states)

    results = ranks.run(run)
    states = {f"gradient of {s.fqn}": p for s, p in zip(graph.states, placements, strict=True)}
    states |= {f"gradient of {n}": p for n, p in zip(graph.inputs, entering, strict=True)}
    states |= {f"output {n}": p for n, p in zip(graph.outputs, leaving, strict=True)}
    joined = {}
    for key in results[0]:
        parts = [result[key] for result in results]
        placement = states.get(key, _WHOLE)
        joined[key] = join_slices(parts, placement)
        if placement.kind != "shard" and any(not torch.allclose(parts[0], x) for x in parts[1:]):
            raise ArithmeticError(f"{key} differs between the ranks")
    return joined
