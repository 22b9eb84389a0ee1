"""What a split backward leaves for later: of a block by its ops, of a stage by its calls.

Torch runs the backward of a stage to its inputs first, and later what parameters need (Qi et al.
2023, section 2). A value is *carried* where an activation of the stage goes into it, and *beside*
where parameters alone do. An op joins the two where it reads both: its gradient is kept, and its
part for the parameters, with all beside that goes into it, runs later. The first stage of a
pipeline has no inputs to send gradients of: all of its backward runs later. And a stage where what
a parameter was read for comes to where the same parameter is read again cannot be split: all of it
runs at once (`autoplan.split_backward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from autoplan.graph import Trace
from autoplan.local import LocalBlock
from autoplan.stage_costs import StageBackward

__all__ = ["OpPart", "graph_nodes", "op_parts", "released_bytes", "splits", "stage_backward"]

OpPart = Literal["inputs", "joint", "weights"]
"""Whether an op's backward runs at once, in two parts, or later."""


def op_parts(local: LocalBlock) -> dict[str, OpPart]:
    """Return by op when its backward runs where the block's inputs are carried."""
    carried = set(local.inputs)
    beside = {state.name for state in local.block.states if state.is_trained}
    parts: dict[str, OpPart] = {}
    for op in local.ops:
        needing = {*op.grads, *(name for name, _ in op.parameter_grads)}
        is_carried, is_beside = not needing.isdisjoint(carried), not needing.isdisjoint(beside)
        if is_carried:
            carried.add(op.name)
            parts[op.name] = "joint" if is_beside else "inputs"
        elif is_beside:
            beside.add(op.name)
            parts[op.name] = "weights"
        else:
            parts[op.name] = "inputs"
    return parts


def released_bytes(local: LocalBlock, parts: Mapping[str, OpPart]) -> int:
    """Return what the block keeps that no later part needs, if no block after it has parameters.

    Autograd holds what is below an op that joins, towards the inputs, and lets go of what is above:
    of a last block the loss.
    """
    wanted: set[str] = set()
    held: set[str] = set()
    let_go: set[str] = set()
    internal = 0
    for op in reversed(local.ops):
        if parts[op.name] == "inputs" and op.name not in wanted:
            let_go.update(op.saved)
            internal += op.internal_bytes
            continue
        wanted.update(op.grads)
        held.update(op.saved)
    sizes = {op.storage: op.nbytes for op in local.ops if op.storage == op.name}
    sizes |= {name: nbytes for op in local.ops for name, nbytes in op.casts}
    return internal + sum(sizes.get(owner, 0) for owner in let_go - held)


def stage_backward(trace: Trace, calls: Sequence[int]) -> StageBackward:
    """Return how the backward of a stage of these calls runs where the schedule splits it."""
    if calls[0] == 0:
        return "late"
    if _share(trace, calls):
        return "whole" if _reads_again(trace, calls) else "split"
    is_whole = any(_reads_again(trace, (index,)) for index in _one_of_each(trace, calls))
    return "whole" if is_whole else "split"


def splits(trace: Trace) -> bool:
    """Return whether every stage but the first can be split, wherever the chain is cut.

    It can if no two calls share a parameter, the first call apart, and no block reads one again.
    """
    if _share(trace, range(1, len(trace.calls))):
        return False
    return not any(_reads_again(trace, (index,)) for index in _one_of_each(trace))


def graph_nodes(trace: Trace) -> int:
    """Return the ops of a whole chain that have a backward, and parameters that get a gradient."""
    by_block = [
        sum(op.needs_grad for op in block.ops) + sum(state.is_trained for state in block.states)
        for block in trace.blocks
    ]
    return sum(by_block[call.block] for call in trace.calls)


def _one_of_each(trace: Trace, calls: Sequence[int] | None = None) -> list[int]:
    """Return one call of each block."""
    every = range(len(trace.calls)) if calls is None else calls
    return list({trace.calls[index].block: index for index in every}.values())


def _trained(trace: Trace, block: int, states: Sequence[str]) -> list[str]:
    named = zip(trace.blocks[block].states, states, strict=True)
    return [fqn for state, fqn in named if state.is_trained]


def _share(trace: Trace, calls: Sequence[int]) -> bool:
    """Return whether two calls share a trained parameter."""
    canonical = {fqn: group[0] for group in trace.shared for fqn in group}
    seen: set[str] = set()
    for index in calls:
        call = trace.calls[index]
        own = {canonical.get(fqn, fqn) for fqn in _trained(trace, call.block, call.states)}
        if own & seen:
            return True
        seen |= own
    return False


def _reads_again(trace: Trace, calls: Sequence[int]) -> bool:
    """Return whether a parameter goes into a carried value that meets the same parameter again."""
    canonical = {fqn: group[0] for group in trace.shared for fqn in group}
    below: dict[str, frozenset[str]] = {}
    made = {value for index in calls for value in trace.calls[index].outs}
    carried: set[str] = set()
    nothing: frozenset[str] = frozenset()
    for index in calls:
        call = trace.calls[index]
        block = trace.blocks[call.block]
        own: dict[str, frozenset[str]] = {}
        on_way: set[str] = set()
        for value, argument in zip(block.inputs, call.args, strict=True):
            own[value.name] = below.get(argument, nothing)
            is_entering = argument not in made and value.is_activation and value.needs_grad
            if argument in carried or is_entering:
                on_way.add(value.name)
        for state, fqn in zip(block.states, call.states, strict=True):
            if state.is_trained:
                own[state.name] = frozenset((canonical.get(fqn, fqn),))
        for op in block.ops:
            if not op.needs_grad:
                continue
            along = nothing.union(*(own.get(n, nothing) for n in op.inputs if n in on_way))
            beside = nothing.union(*(own.get(n, nothing) for n in op.inputs if n not in on_way))
            is_carried = not on_way.isdisjoint(op.inputs)
            if is_carried and along & beside:
                return True
            own[op.name] = along | beside
            if is_carried:
                on_way.add(op.name)
        for name, out in zip(block.outputs, call.outs, strict=True):
            below[out] = own.get(name, nothing)
            if name in on_way:
                carried.add(out)
    return False
