"""Check without a process group that a block computes the same under a tensor-parallel layout.

Each rank of the layout is a thread that runs the lowered graph of the block, forward and backward,
in float64 on random numbers; their collectives meet in memory. Outputs, input gradients and
parameter gradients are held against the whole graph. Dropout is switched off, since ranks draw
differently.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from autoplan import compat
from autoplan.axis_labels import op_name
from autoplan.collectives import join_slices, local_slice
from autoplan.dry_run_result import LayoutNumerics
from autoplan.executor import compile_graph
from autoplan.graph import Placement
from autoplan.lowering import LoweredBlock, lower
from autoplan.op_facts import is_random
from autoplan.plan import Plan
from autoplan.program import BlockGraph, Op, Program, TensorMeta
from autoplan.sharding import shard_options

__all__ = ["check_layout_numerics", "check_plan_layouts"]

_TOLERANCE = 1e-9
_COARSE_TOLERANCE = 1e-4  # of blocks that cast to a smaller dtype inside
_MOST_ELEMENTS = 1 << 24  # of states and results together: 128 MiB in float64
_TIMEOUT_S = 60.0
_WHOLE = Placement(kind="replicate")
_checked: dict[tuple[str, str, int], tuple[float | None, str, bool]] = {}


def check_plan_layouts(plan: Plan, program: Program) -> tuple[LayoutNumerics, ...]:
    """Check every layout that a plan uses, once for each class of blocks."""
    found: dict[tuple[int, str], LayoutNumerics] = {}
    for stage in plan.stages:
        for block in stage.blocks:
            key = (program.calls[block.call].graph, block.placements)
            layout = plan.placements.get(block.placements)
            if layout is None or not layout.axes or key in found:
                continue
            graph = program.graphs[key[0]]
            is_sliced = layout.borders == "tokens"
            text = f"{sorted(layout.axes.items())} {layout.borders}"
            known = (graph.fingerprint, text, layout.degree)
            if known not in _checked:
                _checked[known] = check_layout_numerics(
                    graph, layout.axes, layout.degree, is_sequence_parallel=is_sliced
                )
            error, reason, is_wrong = _checked[known]
            found[key] = LayoutNumerics(
                block=graph.name,
                layout=block.placements,
                degree=layout.degree,
                error=error,
                reason=reason,
                is_wrong=is_wrong,
            )
    return tuple(found.values())


def check_layout_numerics(
    graph: BlockGraph,
    axes: Mapping[str, str],
    degree: int,
    *,
    is_sequence_parallel: bool = False,
) -> tuple[float | None, str, bool]:
    """Return what `_check` returns, from a forked process.

    A process that has run a backward cannot fork workers any more, and this one may want to.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(theirs, graph, axes, degree, is_sequence_parallel), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            return None, f"not run: no result after {_TIMEOUT_S:g} s", False
        answer: tuple[float | None, str, bool] = ours.recv()
    except EOFError:
        return None, "not run: its process died", False
    finally:
        process.kill()
        process.join()
        ours.close()
    return answer


def _serve(
    pipe: Connection,
    graph: BlockGraph,
    axes: Mapping[str, str],
    degree: int,
    is_sequence_parallel: bool,
) -> None:
    torch.set_num_threads(1)
    pipe.send(_check(graph, axes, degree, is_sequence_parallel=is_sequence_parallel))
    os._exit(0)


def _check(
    graph: BlockGraph, axes: Mapping[str, str], degree: int, *, is_sequence_parallel: bool
) -> tuple[float | None, str, bool]:
    """Return the error of a layout (None: not run), a reason, and whether it is wrong.

    Args:
        graph: as captured; its sizes are run as they are.
        axes: op name -> axis.
        degree: ranks, one thread each.
        is_sequence_parallel: activations enter and leave as slices of tokens where they can.
    """
    elements = _elements(graph)
    if elements > _MOST_ELEMENTS:
        return None, f"not run: {elements:,} elements, more than {_MOST_ELEMENTS:,}", False
    ops = tuple(_without_dropout(op) for op in graph.ops)
    drawing = [op.name for op in ops if is_random(op)]
    if drawing:
        return None, f"not run: {drawing[0]} draws random numbers", False
    quiet = replace(graph, ops=tuple(_in_float64(op) for op in ops))
    values = _Values.random(quiet)
    try:
        expected = _run_whole(quiet, values)
    except Exception as error:  # an operator without float64, or random numbers that it refuses
        return None, f"not run: {type(error).__name__}: {error}", False
    infinite = [name for name, x in expected.items() if not bool(x.isfinite().all())]
    if infinite:
        return None, f"not run: {infinite[0]} is not finite for random numbers", False
    try:
        options = shard_options(quiet)
        group = _ThreadGroup(degree)
        blocks = [
            lower(
                quiet,
                options,
                axes,
                degree=degree,
                rank=r,
                group=group.member(r),
                is_sequence_parallel=is_sequence_parallel,
            )
            for r in range(degree)
        ]
        got = _run_ranks(quiet, blocks, values, group)
    except Exception as error:
        return None, f"cannot be run: {type(error).__name__}: {error}", True
    tolerance = _COARSE_TOLERANCE if _is_coarse(quiet) else _TOLERANCE
    name, largest = "", 0.0
    scales = {k: float(x.abs().max()) if x.numel() else 0.0 for k, x in expected.items()}
    # A gradient that is nothing but rounding, as that of a bias of keys, is held against others.
    noise = 1e-3 * max(scales.values(), default=0.0)
    for key, tensor in expected.items():
        scale = max(scales[key], noise)
        off = float((got[key] - tensor).abs().max()) if tensor.numel() else 0.0
        error_here = off / max(scale, 1e-6)
        if not error_here <= largest:
            name, largest = key, error_here
    is_wrong = not largest <= tolerance
    return largest, f"{name} differs" if is_wrong else "", is_wrong


def _elements(graph: BlockGraph) -> int:
    metas = [s.meta for s in graph.states] + [op.meta for op in graph.ops if op.meta is not None]
    return sum(torch.Size(m.shape).numel() for m in metas)


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


def _in_float64(op: Op) -> Op:
    """Return an op that makes float64 where it is told to make a smaller floating-point dtype."""

    def widen(value: Any) -> Any:
        is_float = isinstance(value, torch.dtype) and value.is_floating_point
        return torch.float64 if is_float else value

    args = tuple(widen(value) for value in op.args)
    kwargs = {key: widen(value) for key, value in op.kwargs.items()}
    return replace(op, args=args, kwargs=kwargs)


def _is_coarse(graph: BlockGraph) -> bool:
    """Return whether an op casts in a way that its arguments do not tell, such as `float()`."""
    return any(op.target_name.startswith(("opaque_", "aten.type_as")) for op in graph.ops)


@dataclass(frozen=True, slots=True)
class _Values:
    """Random inputs, states and gradients of a graph, whole."""

    inputs: tuple[torch.Tensor, ...]
    states: tuple[torch.Tensor, ...]

    @classmethod
    def random(cls, graph: BlockGraph) -> _Values:
        generator = torch.Generator().manual_seed(0)
        bound = _smallest_table(graph)

        def make(meta: TensorMeta | None) -> torch.Tensor:
            assert meta is not None, "an input is a tensor"
            if meta.dtype.is_floating_point:
                return torch.randn(meta.shape, generator=generator, dtype=torch.float64) * 0.5
            if meta.dtype == torch.bool:
                return torch.ones(meta.shape, dtype=torch.bool)
            return torch.randint(0, bound, meta.shape, generator=generator, dtype=meta.dtype)

        inputs = tuple(make(meta) for meta in graph.input_metas)
        return cls(inputs, tuple(make(state.meta) for state in graph.states))


def _smallest_table(graph: BlockGraph) -> int:
    """Return a bound for integers: rows of the smallest table, columns of the smallest logits."""
    sizes = [2]
    found = []
    for op in graph.ops:
        name = op_name(op)
        if name in ("embedding", "cross_entropy_loss", "nll_loss", "gather", "index_select"):
            meta = graph.meta(op.inputs()[0])
            if meta is not None and meta.shape:
                found.append(meta.shape[0 if name == "embedding" else -1])
    return min(found) if found else sizes[0]


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
        tuple(states), *[x.view_as(x) for x in inputs]
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
        f"output {name}": x.detach()
        for name, x in zip(graph.outputs, outputs, strict=True)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    named = [*zip(graph.inputs, inputs, strict=True)]
    named += [(s.fqn, x) for s, x in zip(graph.states, states, strict=True)]
    found |= {f"gradient of {name}": x.grad for name, x in named if x.grad is not None}
    return found


def _run_ranks(
    graph: BlockGraph, blocks: Sequence[LoweredBlock], values: _Values, group: _ThreadGroup
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
            tuple(states), *[x.view_as(x) for x in inputs]
        )
        _backward(outputs, leaving, rank, degree)
        return _results(graph, outputs, inputs, states)

    results = group.run(run)
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


class _ThreadGroup:
    """Ranks of one process that exchange tensors in memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.slots: list[Any] = [None] * size

    def member(self, rank: int) -> dist.ProcessGroup:
        """Return the process group of a rank."""
        return compat.memory_group(rank, self.size, self.exchange)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks gave."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what `function(rank)` returns in a thread of each rank; raises its first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:  # raised again below, by the thread that waits
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (first or errors)[0]
        return results
