"""Recomputation of a part of a block: some ops keep only what enters them and run again.

This is selective recomputation as Korthikanti et al. 2022, section 5, runs it: the attention core
is a checkpointed region inside a block that otherwise keeps what autograd saves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autoplan.graph import BlockTrace
from autoplan.liveness import block_memory
from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.plan import Recompute

__all__ = ["attention_core", "folded"]


def attention_core(block: BlockTrace) -> tuple[str, ...]:
    """Return the ops of attention without its projections: what depends on scores.

    A fused kernel is its own region. Otherwise the region goes from the product that has two
    activations (scores) to the next such product (values).

    Returns:
        Names in order; empty where the block has no attention.
    """
    fused = tuple(op.name for op in block.ops if op.kind == "attention")
    if fused:
        return fused
    states = {state.name for state in block.states}
    products = [
        index
        for index, op in enumerate(block.ops)
        if op.kind == "gemm" and not any(name in states for name in op.inputs)
    ]
    if len(products) != 2:
        return ()
    first, last = products
    reached = {block.ops[first].name}
    for op in block.ops[first + 1 : last + 1]:
        if any(name in reached for name in op.inputs):
            reached.add(op.name)
    return tuple(op.name for op in block.ops if op.name in reached)


def folded(local: LocalBlock, names: Collection[str]) -> LocalBlock:
    """Return a block in which the named ops are one op that keeps only what enters them.

    Its backward first runs them forward again, so the peak of that is its transient.

    Args:
        local: the block as one rank runs it.
        names: ops of the region, one result of which leaves it.
    """
    region = [op for op in local.ops if op.name in names]
    if not region:
        return local
    made = {op.name for op in region}
    storage = {op.name: op.storage for op in local.ops}
    entering = tuple(dict.fromkeys(n for op in region for n in op.inputs if n not in made))
    owners = {storage.get(name, name) for name in entering}
    sizes = {n: local.value_bytes[n] for n in owners}
    last = region[-1]
    alone = replace(local, ops=tuple(region), inputs=sizes, outputs=(last.name,))
    memory = block_memory(alone, Recompute(mode="none"))
    fold = LocalOp(
        name=last.name,
        op=last.op,
        option=last.option,
        inputs=entering,
        storage=last.storage,
        nbytes=last.nbytes,
        value_bytes=last.value_bytes,
        saved=tuple(sorted(owners)),
        forward_temp_bytes=max(0, memory.forward_peak - last.nbytes),
        backward_temp_bytes=max(0, memory.backward_peak - sum(sizes.values()) - last.value_bytes),
        grads=tuple(dict.fromkeys(n for op in region for n in op.grads if n not in made)),
    )
    ops = []
    for op in local.ops:
        if op.name == last.name:
            ops.append(fold)
        elif op.name not in names:
            ops.append(op)
    return replace(local, ops=tuple(ops))
