"""What a split backward leaves for later: of a block by its ops, of a stage by its calls.

Torch runs the backward of a stage to its inputs first, and later what parameters need (Qi et al.
2023, section 2). A value is *carried* where an activation of the stage goes into it, and *beside*
where parameters alone do. An op joins the two where it reads both: its gradient is kept, and its
part for the parameters, with all beside that goes into it, runs later. The first stage of a
pipeline has no inputs to send gradients of: all of its backward runs later. And a stage cannot be
split where what a parameter was read for comes to where the same parameter is read again, nor where
a value beside is handed on to another stage: all of it runs at once (`autoplan.split_backward`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from autoplan.graph import BlockTrace, Trace
from autoplan.local_blocks import LocalBlock
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
    if _hands_on_parameters(trace, calls):
        return "whole"
    if _share(trace, calls):
        return "whole" if _reads_again(trace, calls) else "split"
    is_whole = any(_block_reads_again(trace, index) for index in _one_of_each(trace, calls))
    return "whole" if is_whole else "split"


def splits(trace: Trace) -> bool:
    """Return whether every stage but the first can be split, wherever the chain is cut.

    It can if, the first call apart, no two calls share a parameter, no block reads one again, and
    no call hands on what follows from parameters alone.
    """
    if _share(trace, range(1, len(trace.calls))):
        return False
    kinds = {b: _outputs_beside(block) for b, block in enumerate(trace.blocks)}
    last_read = {arg: index for index, call in enumerate(trace.calls) for arg in call.args}
    for index, call in enumerate(trace.calls):
        own = kinds[call.block]
        if index and any(last_read.get(call.outs[place], -1) > index for place in own):
            return False
    return not any(_block_reads_again(trace, index) for index in _one_of_each(trace))


def graph_nodes(trace: Trace) -> int:
    """Return the ops of a whole chain that have a backward, and parameters that get a gradient."""
    by_block = [
        sum(op.needs_grad for op in block.ops) + sum(state.is_trained for state in block.states)
        for block in trace.blocks
    ]
    return sum(by_block[call.block] for call in trace.calls)


def _hands_on_parameters(trace: Trace, calls: Sequence[int]) -> bool:
    """Return whether what later calls read follows from the parameters of a stage alone."""
    beside: set[str] = set()
    for index in calls:
        call = trace.calls[index]
        block = trace.blocks[call.block]
        entering = list(zip(block.inputs, call.args, strict=True))
        own = _beside(
            block,
            carried={v.name for v, arg in entering if v.needs_grad and arg not in beside},
            beside={v.name for v, arg in entering if arg in beside},
        )
        beside |= {out for name, out in zip(block.outputs, call.outs, strict=True) if name in own}
    return any(not beside.isdisjoint(call.args) for call in trace.calls[calls[-1] + 1 :])


def _outputs_beside(block: BlockTrace) -> list[int]:
    """Return which outputs of a block by itself follow from its parameters alone."""
    own = _beside(block, carried={v.name for v in block.inputs if v.needs_grad}, beside=set())
    return [place for place, name in enumerate(block.outputs) if name in own]


def _beside(block: BlockTrace, *, carried: set[str], beside: set[str]) -> set[str]:
    """Return the values of a block that follow from parameters alone.

    Args:
        block: a class of calls.
        carried: inputs that an activation of the stage goes into.
        beside: inputs that parameters alone go into.
    """
    carried, beside = set(carried), set(beside)
    beside |= {state.name for state in block.states if state.is_trained}
    for op in block.ops:
        if op.needs_grad and not carried.isdisjoint(op.inputs):
            carried.add(op.name)
        elif op.needs_grad and not beside.isdisjoint(op.inputs):
            beside.add(op.name)
    return beside


def _one_of_each(trace: Trace, calls: Sequence[int] | None = None) -> list[int]:
    """Return one call of each block."""
    every = range(len(trace.calls)) if calls is None else calls
    return list({trace.calls[index].block: index for index in every}.values())


def _trained(trace: Trace, block: int, states: Sequence[str]) -> list[str]:
    named = zip(trace.blocks[block].states, states, strict=True)
    return [fqn for state, fqn in named if state.is_trained]


def _share(trace: Trace, calls: Sequence[int]) -> bool:
    """Return whether two calls share a trained parameter."""
    canonical = trace.first_names()
    seen: set[str] = set()
    for index in calls:
        call = trace.calls[index]
        own = {canonical.get(fqn, fqn) for fqn in _trained(trace, call.block, call.states)}
        if own & seen:
            return True
        seen |= own
    return False


def _block_reads_again(trace: Trace, index: int) -> bool:
    """Return whether one call does by itself; most blocks read every parameter in one place."""
    call = trace.calls[index]
    block = trace.blocks[call.block]
    names = _trained(trace, call.block, call.states)
    if any(len(set(group).intersection(names)) > 1 for group in trace.shared):
        return _reads_again(trace, (index,))
    beside = {state.name for state in block.states if state.is_trained}
    seen: set[str] = set()
    for op in block.ops:
        own = beside.intersection(op.inputs)
        if own & seen:
            return _reads_again(trace, (index,))
        seen |= own
        if own and beside.issuperset(op.inputs):
            beside.add(op.name)
    return False


def _reads_again(trace: Trace, calls: Sequence[int]) -> bool:
    """Return whether a parameter goes into a carried value that meets the same parameter again."""
    canonical = trace.first_names()
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
