"""Count what autograd keeps for backward: on real tensors, and from a trace.

Real runs are of two programs: the model's own forward, and the captured program, which is what a
planned module runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.autocast import around_step
from autoplan.graph import Trace
from autoplan.program import Op, Program, map_refs
from autoplan.runner import attribute_tensors

__all__ = ["kept_by_autograd", "kept_by_trace", "kept_tensors", "run_captured", "surplus"]


def kept_tensors(module: nn.Module, run: Callable[[], object]) -> list[torch.Tensor]:
    """Return one tensor for each storage that `run()` keeps, states of `module` excluded.

    `run` returns what has the graph, a tensor or a nest of them. Counted are saved tensors and what
    custom backwards hold as attributes.
    """
    states = [*module.parameters(), *module.buffers()]
    excluded = {tensor.untyped_storage()._cdata for tensor in states}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    saved += _attributes_in_graph(result)
    kept = {tensor.untyped_storage()._cdata: tensor for tensor in saved}
    return [tensor for key, tensor in kept.items() if key not in excluded]


def _attributes_in_graph(result: object) -> list[torch.Tensor]:
    """Return what the nodes of the graph behind a result hold as attributes."""
    roots = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    nodes = [tensor.grad_fn for tensor in roots if tensor.grad_fn is not None]
    seen = set(nodes)
    found: list[torch.Tensor] = []
    while nodes:
        node = nodes.pop()
        found += attribute_tensors([node])
        fresh = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= fresh
        nodes += fresh
    return found


def kept_by_autograd(module: nn.Module, run: Callable[[], object]) -> list[int]:
    """Return the sorted sizes of the storages that `run()` keeps; see `kept_tensors`."""
    return sorted(tensor.untyped_storage().nbytes() for tensor in kept_tensors(module, run))


def kept_by_trace(trace: Trace) -> list[int]:
    """Return the sorted sizes of the storages that a trace says autograd keeps, each once."""
    kept: dict[object, int] = {}
    owner: dict[str, object] = {}
    for number, call in enumerate(trace.calls):
        block = trace.blocks[call.block]
        names = [value.name for value in block.inputs]
        bound = {n: owner.get(arg, arg) for n, arg in zip(names, call.args, strict=True)}
        storages = {op.name: op.storage for op in block.ops}
        for op in block.ops:
            for index, saved in enumerate(op.saved):
                inside = (number, saved.value) if saved.value else (number, op.name, index)
                kept[bound.get(saved.value, inside)] = saved.nbytes
        for name, out in zip(block.outputs, call.outs, strict=True):
            owner[out] = bound.get(storages[name], (number, storages[name]))
    return sorted(kept.values())


def surplus(more: Sequence[torch.Tensor], less: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Return what the first keeps beyond the second: such as `2 x int64[1, 16] of 128 B`."""

    def kinds(tensors: Sequence[torch.Tensor]) -> Counter[str]:
        return Counter(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} "
            f"of {t.untyped_storage().nbytes()} B"
            for t in tensors
        )

    return tuple(f"{count} x {kind}" for kind, count in (kinds(more) - kinds(less)).items())


def run_captured(
    program: Program, model: nn.Module, batch: Any, autocast: torch.dtype | None = None
) -> torch.Tensor:
    """Return the loss of a captured program on the CPU, run as a planned module of one device does.

    Args:
        program: as `capture` returned it for this model and batch.
        model: has the states.
        batch: as for the capture.
        autocast: dtype of the autocast around the step, if there is one.
    """
    states: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    states |= dict(model.named_buffers(remove_duplicate=False))
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    values: dict[str, Any] = dict(zip(program.inputs, leaves, strict=True))
    values |= program.constants
    values |= {name: states[fqn] for name, fqn in program.side_states.items()}
    with around_step(autocast):
        for op in program.side_ops:
            values[op.name] = _run(op, values)
    for call in program.calls:
        graph = program.graphs[call.graph]
        local = dict(zip(graph.inputs, (values[name] for name in call.args), strict=True))
        local |= {s.name: states[f] for s, f in zip(graph.states, call.states, strict=True)}
        with around_step(autocast):
            for op in graph.ops:
                local[op.name] = _run(op, local)
        values |= zip(call.outs, (local[name] for name in graph.outputs), strict=True)
    loss: torch.Tensor = values[program.loss]
    return loss


def _run(op: Op, values: dict[str, Any]) -> Any:
    arguments = map_refs((op.args, dict(op.kwargs)), values.__getitem__)
    args, kwargs = pytree.tree_map(
        lambda leaf: torch.device("cpu") if isinstance(leaf, torch.device) else leaf, arguments
    )
    return op.target(*args, **kwargs)
