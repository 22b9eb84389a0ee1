"""Run block graphs op by op on fake CPU tensors and record what autograd keeps for backward.

The ops run under `saved_tensors_hooks`, as autograd would see them, so what is recorded is what
autograd keeps, each storage once. All functions expect an active `FakeTensorMode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.autocast import around_step, bare, is_cast
from autoplan.backends import Backend, replacement, with_true_statistics
from autoplan.cuda_autocast import CudaAutocast
from autoplan.custom_ops import custom_op
from autoplan.errors import TraceError
from autoplan.kernels import storage_bytes, storage_key, tensors_in
from autoplan.op_facts import mutates_input
from autoplan.opcost import OpCost, OpMeter
from autoplan.program import BlockGraph, Op, Program, TensorMeta, map_refs

__all__ = ["BlockRun", "attribute_tensors", "run_block", "run_program", "true_metas"]


@dataclass(slots=True, kw_only=True)
class BlockRun:
    """What running a block on fake tensors gave.

    Attributes:
        values: fake tensor (or tuple of them) by value name.
        owners: value name by storage key: the first value that had the storage.
        saved: storage keys and bytes that autograd kept, by op name.
        casts: by op name, the names and bytes of the copies of states that autocast made for it.
        costs: by op name.
        alive: tensors held so that no storage key is used twice.
    """

    values: dict[str, Any] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    saved: dict[str, dict[int, int]] = field(default_factory=dict)
    casts: dict[str, dict[str, int]] = field(default_factory=dict)
    costs: dict[str, OpCost] = field(default_factory=dict)
    alive: list[torch.Tensor] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()


def _fake(meta: TensorMeta) -> torch.Tensor:
    tensor = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    return tensor.requires_grad_() if meta.requires_grad else tensor


def _on_cpu(value: Any) -> Any:
    """Return an op's constant arguments with the meta device replaced."""
    return pytree.tree_map(
        lambda leaf: torch.device("cpu") if isinstance(leaf, torch.device) else leaf, value
    )


def run_program(
    program: Program, backend: Backend, meter: OpMeter
) -> tuple[dict[int, BlockRun], dict[str, Any]]:
    """Return one run of every block graph by index, and all values of a program by name.

    Raises:
        TraceError: an op cannot run on fake tensors; names the op, its module and line.
    """
    runs: dict[int, BlockRun] = {}
    with around_step(program.autocast if backend == "cpu" else None):
        values = _side_values(program, _casts(program, backend))
        buffers = {storage_key(values[name]) for name in program.side_states}
        for call in program.calls:
            if call.graph not in runs:
                graph = program.graphs[call.graph]
                inputs = [values[name] for name in call.args]
                runs[call.graph] = run_block(
                    graph, inputs, backend, meter, call.fqn, buffers, _casts(program, backend)
                )
            values.update(zip(call.outs, runs[call.graph].outputs, strict=True))
    return runs, values


def true_metas(program: Program, backend: Backend) -> dict[str, TensorMeta]:
    """Return the metas of a program's values as they are on a device.

    They are those of the capture, but for the dtypes of call results under autocast on CUDA.
    """
    if backend == "cpu" or program.autocast is None:
        return dict(program.metas)
    with FakeTensorMode(), torch.enable_grad():
        _, values = run_program(program, backend, OpMeter(backend, program.autocast))
    return {
        name: replace(meta, dtype=values[name].dtype)
        if isinstance(values.get(name), torch.Tensor)
        else meta
        for name, meta in program.metas.items()
    }


def _casts(program: Program, backend: Backend) -> CudaAutocast | None:
    """Return the casts that stand for autocast where its own would be those of the CPU."""
    if backend == "cpu" or program.autocast is None:
        return None
    return CudaAutocast(program.autocast)


def _side_values(program: Program, casts: CudaAutocast | None) -> dict[str, Any]:
    """Return fake tensors for the batch inputs, constants and side values of a program."""
    values: dict[str, Any] = {}
    for name, meta in zip(program.inputs, program.input_metas, strict=True):
        values[name] = _fake(meta)
    for name, tensor in program.constants.items():
        values[name] = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    for name in program.side_states:
        values[name] = _fake(program.metas[name])
    for op in program.side_ops:
        function = op.target if casts is None else casts.around(op.target, op)
        values[op.name] = _execute(op, values, function, "")
    return values


def _arguments(op: Op, values: Mapping[str, Any]) -> tuple[Any, Any]:
    args, kwargs = _on_cpu(map_refs((op.args, dict(op.kwargs)), values.__getitem__))
    return args, kwargs


def _execute(op: Op, values: Mapping[str, Any], function: Any, block_fqn: str) -> Any:
    args, kwargs = _arguments(op, values)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        where = ".".join(part for part in (block_fqn, op.fqn) if part) or "the model"
        raise TraceError(
            f"{where} ({op.line or 'line unknown'}): {op.target_name} cannot run on fake "
            f"tensors: {error}"
        ) from error


def run_block(
    graph: BlockGraph,
    inputs: Sequence[Any],
    backend: Backend,
    meter: OpMeter,
    block_fqn: str,
    buffers: Set[int] = frozenset(),
    casts: CudaAutocast | None = None,
) -> BlockRun:
    """Run a block's ops one by one and record what autograd keeps and what each op costs.

    Args:
        graph: the block.
        inputs: fake tensors that enter, with the strides and storages that they really have.
        backend: whose rules to follow.
        meter: measures each op alone.
        block_fqn: for messages.
        buffers: storages of buffers that inputs may view; what autograd keeps of those is free.
        casts: stand for autocast on CUDA; on the CPU the caller runs under it.

    Raises:
        TraceError: an op cannot run on fake tensors; names the op, its module and line.
    """
    run = BlockRun()
    states = {s.name: _fake(s.meta) for s in graph.states}
    run.values |= states
    excluded = {*buffers, *map(storage_key, states.values())}
    writes = any(mutates_input(op) for op in graph.ops)
    for name, meta, value in zip(graph.inputs, graph.input_metas, inputs, strict=True):
        run.values[name] = _as_input(value, meta, writes)
        _own(run, name)
    seen: set[Any] = set()
    for op in graph.ops:
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            run.alive.append(tensor)
            if storage_key(tensor) not in excluded:
                kept.setdefault(storage_key(tensor), storage_bytes(tensor))
            return tensor

        run.costs[op.name] = _measure(op, run.values, meter, block_fqn)
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            _StateCasts(run, op, states),
        ):
            function = replacement(op.target, backend)
            if casts is not None:
                function = casts.around(function, op)
            run.values[op.name] = _execute(op, run.values, function, block_fqn)
        kept = _told(op, run.values, kept)
        kept = with_true_statistics(bare(op), run.values, kept, backend)
        kept |= _workspaces(kept, run.costs[op.name].workspaces)
        nodes = {tensor.grad_fn for tensor in tensors_in(run.values[op.name])} - seen
        seen |= nodes
        for tensor in attribute_tensors(nodes):
            pack(tensor, kept)
        run.saved[op.name] = kept
        _own(run, op.name)
    run.outputs = tuple(run.values[name] for name in graph.outputs)
    return run


class _StateCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives names to the copies of trained states that autocast makes for an op and remembers."""

    def __init__(self, run: BlockRun, op: Op, states: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self._op = run, op
        self._names = {storage_key(t): n for n, t in states.items() if t.requires_grad}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and not is_cast(self._op):
            state = self._names.get(storage_key(args[0]))
            if state is not None:
                name = f"{state}__autocast"
                self._run.alive.append(result)
                self._run.owners.setdefault(storage_key(result), name)
                self._run.casts.setdefault(self._op.name, {})[name] = storage_bytes(result)
        return result


def _workspaces(kept: Mapping[int, int], workspaces: Sequence[int]) -> dict[int, int]:
    """Return the true sizes of workspaces, which fake tensors show as empty, in order."""
    empty = [key for key, nbytes in kept.items() if nbytes == 0]
    return dict(zip(empty, workspaces, strict=True)) if workspaces else {}


def attribute_tensors(nodes: Iterable[object]) -> list[torch.Tensor]:
    """Return the tensors that nodes of the autograd graph hold as attributes.

    What a `torch.autograd.Function` or a custom operator puts on its context without
    `save_for_backward` lives as long as what it saves, and no hook sees it.
    """
    held = [getattr(node, "__dict__", {}) for node in nodes]
    return [t for attributes in held for t in tensors_in(list(attributes.values()))]


def _told(op: Op, values: Mapping[str, Any], kept: dict[int, int]) -> dict[int, int]:
    """Return what the user told that an operator keeps, if so, else `kept`."""
    told = custom_op(bare(op).target)
    needs_grad = any(tensor.requires_grad for tensor in tensors_in(values[op.name]))
    if told is None or told.saved is None or not needs_grad:
        return kept
    args, kwargs = _arguments(op, values)
    found: dict[int, int] = {}
    for index, item in enumerate(told.saved(*args, values[op.name], **kwargs)):
        if isinstance(item, torch.Tensor):
            found[storage_key(item)] = storage_bytes(item)
        else:
            found[-2 - index] = int(item)
    return found


def _measure(op: Op, values: Mapping[str, Any], meter: OpMeter, block_fqn: str) -> OpCost:
    def measure(*args: Any, **kwargs: Any) -> OpCost:
        return meter.measure(op, args, kwargs)

    return _execute(op, values, measure, block_fqn)  # type: ignore[no-any-return]


def _as_input(value: Any, meta: TensorMeta | None, writes: bool) -> Any:
    """Return a fresh leaf like `value` in the same storage; a copy where the block writes."""

    def leaf(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        wants_grad = tensor.requires_grad if meta is None else meta.requires_grad
        fresh = tensor.detach().requires_grad_(wants_grad)
        return fresh.clone() if writes and wants_grad else fresh

    return pytree.tree_map(leaf, value)


def _own(run: BlockRun, name: str) -> None:
    """Record `name` as owner of the storage of its value, unless another value has it."""
    value = run.values[name]
    run.alive.extend(tensors_in(value))
    if isinstance(value, torch.Tensor):
        run.owners.setdefault(storage_key(value), name)
