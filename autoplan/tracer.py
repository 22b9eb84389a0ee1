"""Trace a captured program: run every block class once on fake tensors and write down the numbers.

A block's ops run one by one on fake CPU tensors under `saved_tensors_hooks`, as autograd would see
them, so what is kept for backward is what autograd keeps, each storage once. The cost of each op is
measured beside it by `autoplan.opcost`. Nothing is computed and no weight is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from autoplan.backends import Backend
from autoplan.batch_linearity import linearity_notes
from autoplan.batches import LossFn
from autoplan.capturer import capture
from autoplan.custom_ops import custom_op
from autoplan.dimensions import program_dimensions
from autoplan.graph import (
    BlockTrace,
    CallTrace,
    OpDimensions,
    OpTrace,
    ParameterTrace,
    SavedTensor,
    ShardOption,
    Trace,
    ValueTrace,
)
from autoplan.kernels import storage_bytes, storage_key, tensors_in
from autoplan.op_facts import is_random, mutates_input, written_inputs
from autoplan.opaque import OpaqueCall
from autoplan.opcost import RECURRENT_PREFIXES, OpMeter
from autoplan.program import BlockGraph, Call, Op, Program, TensorMeta
from autoplan.runner import BlockRun, run_program
from autoplan.sharding import shard_options
from autoplan.shared_writes import changed_states, lost_writes
from autoplan.signatures import op_signature

__all__ = ["recent_program", "remember", "trace", "trace_program"]


def trace(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    microbatch_size: int | None = None,
    batch_dim: Any = 0,
    backend: Backend = "cpu",
    autocast: torch.dtype | None = None,
) -> Trace:
    """Return the trace of `model` and its loss for one micro-batch; the model is left as it is.

    Args:
        model: any module, on any device, `meta` too.
        batch: example input; see `capture` for the forms.
        loss_fn: as for `capture`.
        microbatch_size: rows to trace; None takes the batch as it is.
        batch_dim: as for `capture`.
        backend: device whose kept tensors are wanted; see `autoplan.backends`.
        autocast: as for `capture`.

    Raises:
        TraceError: the model cannot be captured; names the module, the line and the reason.
    """
    program = capture(
        model,
        batch,
        loss_fn,
        microbatch_size=microbatch_size,
        batch_dim=batch_dim,
        autocast=autocast,
    )
    return trace_program(program, backend=backend, model_name=type(model).__name__)


_MOST_RECENT = 4
_RECENT: dict[str, Program] = {}


def recent_program(fingerprint: str) -> Program | None:
    """Return a program that this process traced lately; None where it is forgotten."""
    return _RECENT.get(fingerprint)


def remember(program: Program) -> None:
    """Keep a program for `recent_program`, as the latest."""
    fingerprint = program.fingerprint
    _RECENT.pop(fingerprint, None)
    _RECENT[fingerprint] = program
    while len(_RECENT) > _MOST_RECENT:
        del _RECENT[next(iter(_RECENT))]


def trace_program(program: Program, *, backend: Backend = "cpu", model_name: str) -> Trace:
    """Return the trace of a captured program.

    Args:
        program: what `capture` returned.
        backend: device whose kept tensors are wanted; see `autoplan.backends`.
        model_name: for people.

    Raises:
        TraceError: an op cannot run on fake tensors; names the op, its module and line.
    """
    remember(program)
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"backend is {backend!r}: it must be 'cpu' or 'cuda'")
    made_by_calls = {out for call in program.calls for out in call.outs}
    with FakeTensorMode(), torch.enable_grad():
        runs, values = run_program(program, backend, OpMeter(backend, program.autocast))
        written = _written_storages(program, runs)
        dimensions = program_dimensions(program)
        blocks = tuple(
            _block_trace(
                program, index, runs[index], made_by_calls, written[index], dimensions[index]
            )
            for index in range(len(program.graphs))
        )
        sizes = {name: _nbytes(value) for name, value in values.items()}
    num_parameters, num_trained = _count_parameters(program)
    return Trace(
        model=model_name,
        microbatch_size=program.microbatch_size,
        inputs=tuple(
            _value_trace(name, meta, is_activation=False)
            for name, meta in zip(program.inputs, program.input_metas, strict=True)
        ),
        batch_dims=program.batch_dims,
        blocks=blocks,
        calls=tuple(
            CallTrace(block=c.graph, fqn=c.fqn, args=c.args, outs=c.outs, states=c.states)
            for c in program.calls
        ),
        side=tuple((op.name, sizes[op.name]) for op in program.side_ops),
        shared=_shared(program.aliases),
        crossing_bytes=_crossing_bytes(program.calls, sizes),
        num_parameters=num_parameters,
        num_trained=num_trained,
        backend=backend,
        notes=_notes(program, runs.values(), blocks, backend)
        + linearity_notes(program, dimensions),
        fingerprint=program.fingerprint,
        versions=_versions(),
        lost_writes=lost_writes(program),
        changed=changed_states(program),
    )


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(value))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _value_trace(name: str, meta: TensorMeta | None, *, is_activation: bool) -> ValueTrace:
    meta = meta or TensorMeta((), torch.float32)
    return ValueTrace(
        name=name,
        shape=meta.shape,
        dtype=_dtype_name(meta.dtype),
        nbytes=meta.nbytes,
        is_activation=is_activation,
        needs_grad=is_activation and meta.requires_grad,
    )


def _block_trace(
    program: Program,
    index: int,
    run: BlockRun,
    made_by_calls: set[str],
    written: set[int],
    dimensions: Mapping[str, OpDimensions],
) -> BlockTrace:
    graph = program.graphs[index]
    call = next(call for call in program.calls if call.graph == index)
    return BlockTrace(
        name=graph.name,
        is_glue=graph.is_glue,
        fingerprint=graph.fingerprint,
        inputs=tuple(
            _value_trace(name, meta, is_activation=arg in made_by_calls)
            for name, meta, arg in zip(graph.inputs, graph.input_metas, call.args, strict=True)
        ),
        states=tuple(
            ParameterTrace(
                name=state.name,
                fqn=state.fqn,
                is_absolute=state.is_absolute,
                shape=state.meta.shape,
                dtype=_dtype_name(state.meta.dtype),
                nbytes=state.meta.nbytes,
                is_parameter=state.is_parameter,
                is_trained=state.is_parameter and state.meta.requires_grad,
            )
            for state in graph.states
        ),
        ops=tuple(
            replace(op, dimensions=dimensions[op.name])
            for op in _op_traces(graph, run, written, program.autocast)
        ),
        outputs=graph.outputs,
    )


def _op_traces(
    graph: BlockGraph, run: BlockRun, written: set[int], autocast: torch.dtype | None
) -> tuple[OpTrace, ...]:
    accumulated = _accumulated_bytes(graph, run)
    options = shard_options(graph)
    found = []
    for op in graph.ops:
        traced = _op_trace(op, run, written, accumulated.get(op.name, 0), options[op.name])
        if traced.kind != "view":
            traced = replace(traced, signature=op_signature(op, run.values, autocast))
        found.append(traced)
    return tuple(found)


def _op_trace(
    op: Op,
    run: BlockRun,
    written: set[int],
    accumulated_bytes: int,
    options: tuple[ShardOption, ...],
) -> OpTrace:
    value, cost = run.values[op.name], run.costs[op.name]
    tensors = tensors_in(value)
    is_tensor = isinstance(value, torch.Tensor)
    storage = run.owners.get(storage_key(value), op.name) if is_tensor else op.name
    own_bytes = storage_bytes(value) if is_tensor and storage == op.name else 0
    mutates = mutates_input(op)
    is_float = bool(tensors) and tensors[0].dtype.is_floating_point
    is_written = any(storage_key(tensor) in written for tensor in tensors)
    is_plain = cost.kind != "view" and not mutates and not is_random(op) and not is_written
    is_plain = is_plain and not isinstance(op.target, OpaqueCall)
    return OpTrace(
        name=op.name,
        target=op.target_name,
        fqn=op.fqn,
        kind=cost.kind,
        inputs=op.inputs(),
        shape=tuple(value.shape) if is_tensor else (),
        dtype=_dtype_name(value.dtype) if is_tensor else "",
        nbytes=own_bytes,
        storage=storage,
        gemm=cost.gemm,
        attention=cost.attention,
        forward_flops=cost.forward_flops,
        backward_flops=cost.backward_flops,
        forward_bytes=cost.forward_bytes,
        backward_bytes=cost.backward_bytes + accumulated_bytes,
        accumulated_bytes=accumulated_bytes,
        saved=tuple(
            SavedTensor(value=run.owners.get(key, ""), nbytes=nbytes)
            for key, nbytes in run.saved[op.name].items()
        ),
        casts=tuple(SavedTensor(value=n, nbytes=b) for n, b in run.casts.get(op.name, {}).items()),
        cast_bytes=cost.cast_bytes,
        backward_cast_bytes=cost.backward_cast_bytes,
        mark_bytes=cost.mark_bytes,
        may_mark=is_plain and is_float and cost.mark_bytes > 0,
        is_random=is_random(op),
        mutates=mutates,
        needs_grad=any(tensor.requires_grad for tensor in tensors),
        forward_temp_bytes=cost.forward_temp_bytes,
        backward_temp_bytes=cost.backward_temp_bytes,
        options=options,
    )


def _written_storages(program: Program, runs: Mapping[int, BlockRun]) -> list[set[int]]:
    """Return for each block graph its storages that are written to in place, there or later on."""
    written: list[set[int]] = [set() for _ in program.graphs]
    for index, graph in enumerate(program.graphs):
        names = [name for op in graph.ops for name in written_inputs(op)]
        written[index] = _storages(runs[index], names)
    origin: dict[str, tuple[int, str]] = {}
    for call in program.calls:
        graph, run = program.graphs[call.graph], runs[call.graph]
        for name, arg in zip(graph.inputs, call.args, strict=True):
            if arg in origin and _storages(run, [name]) & written[call.graph]:
                source, result = origin[arg]
                written[source] |= _storages(runs[source], [result])
        for name, out in zip(graph.outputs, call.outs, strict=True):
            origin[out] = (call.graph, name)
    return written


def _storages(run: BlockRun, names: Iterable[str]) -> set[int]:
    return {storage_key(tensor) for name in names for tensor in tensors_in(run.values[name])}


def _accumulated_bytes(graph: BlockGraph, run: BlockRun) -> dict[str, int]:
    """Return the bytes that backward moves to add up gradients, by op.

    A value read by n ops that need its gradient gets n addends, so n - 1 sums of it run: two reads
    and one write each. All readers but the last one carry one.
    """
    bytes_by_op: dict[str, int] = {}
    seen: set[str] = set()
    for op in reversed(graph.ops):
        if not any(tensor.requires_grad for tensor in tensors_in(run.values[op.name])):
            continue
        for name in op.inputs():
            value = run.values[name]
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                continue
            if name in seen:
                moved = 3 * value.numel() * value.itemsize
                bytes_by_op[op.name] = bytes_by_op.get(op.name, 0) + moved
            seen.add(name)
    return bytes_by_op


def _crossing_bytes(calls: Sequence[Call], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the bytes of call results that are read beyond each position between two calls."""
    last_read: dict[str, int] = {}
    for index, call in enumerate(calls):
        last_read.update(dict.fromkeys(call.args, index))
    crossing = [0] * max(len(calls) - 1, 0)
    for index, call in enumerate(calls):
        for out in call.outs:
            for position in range(index, last_read.get(out, index)):
                crossing[position] += sizes[out]
    return tuple(crossing)


def _shared(aliases: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    groups: dict[str, list[str]] = {}
    for fqn, first in aliases.items():
        groups.setdefault(first, []).append(fqn)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _count_parameters(program: Program) -> tuple[int, int]:
    """Return (elements, trained elements) of the parameters read, shared ones once."""
    metas: dict[str, TensorMeta] = {}
    for call in program.calls:
        for state, fqn in zip(program.graphs[call.graph].states, call.states, strict=True):
            if state.is_parameter:
                metas[program.aliases.get(fqn, fqn)] = state.meta
    numels = [(torch.Size(meta.shape).numel(), meta.requires_grad) for meta in metas.values()]
    return sum(n for n, _ in numels), sum(n for n, trained in numels if trained)


def _notes(
    program: Program, runs: Iterable[BlockRun], blocks: Sequence[BlockTrace], backend: Backend
) -> tuple[str, ...]:
    notes = list(program.notes)
    notes += [cost.note for run in runs for cost in run.costs.values() if cost.note]
    opaque = sorted({op.target for block in blocks for op in block.ops if op.kind == "opaque"})
    opaque = [target for target in opaque if not target.startswith("opaque_")]
    told = {
        op.target_name for g in program.graphs for op in g.ops if custom_op(op.target) is not None
    }
    notes += [
        f"{target}: no law for its FLOPs; priced by the bytes it moves (see register_op)"
        for target in opaque
        if not target.startswith(RECURRENT_PREFIXES) and target not in told
    ]
    notes += [
        f"{target}: cuDNN keeps a reserve of unknown size; counted is what the CPU's kernel keeps"
        for target in opaque
        if target.startswith(RECURRENT_PREFIXES) and backend == "cuda"
    ]
    read = {program.aliases.get(fqn, fqn) for call in program.calls for fqn in call.states}
    unread = sorted(set(program.aliases.values()) - read)
    if unread:
        shown = ", ".join(unread[:3]) + (" ..." if len(unread) > 3 else "")
        notes.append(f"{len(unread)} parameters are not used by the loss: {shown}")
    return tuple(dict.fromkeys(notes))


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        versions["transformers"] = str(transformers.__version__)
    return versions
