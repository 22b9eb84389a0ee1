"""Two ways to count what autograd keeps for backward: on real tensors, and from a trace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autoplan.graph import BlockTrace, Trace

__all__ = ["kept_by_autograd", "kept_by_block", "kept_by_trace"]


def kept_by_autograd(module: nn.Module, run: Callable[[], object]) -> list[int]:
    """Return the sorted sizes of the storages that `run()` keeps, states of `module` excluded."""
    states = [*module.parameters(), *module.buffers()]
    excluded = {tensor.untyped_storage()._cdata for tensor in states}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sorted(kept.values())


def kept_by_block(block: BlockTrace) -> list[int]:
    """Return the sorted sizes of the storages that one block keeps, its inputs included."""
    kept: dict[object, int] = {}
    for op in block.ops:
        for index, saved in enumerate(op.saved):
            kept[saved.value or (op.name, index)] = saved.nbytes
    return sorted(kept.values())


def kept_by_trace(trace: Trace) -> list[int]:
    """Return the sorted sizes of the storages that the whole model keeps, each once."""
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
