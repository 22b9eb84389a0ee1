"""Tensors that live longer than their last reader because a Python frame still names them.

What autoplan emits lets go of every value after its last use. Other software has locals:
Megatron-LM of 2021 and Megatron-DeepSpeed compute attention in one method (`transformer.py`,
`ParallelAttention.forward`), whose `query_layer`, `attention_scores`, `attention_probs` and others
stay until the product after it has run and been summed; later versions split the method
(`CoreAttention`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from autoplan.local_blocks import LocalBlock

__all__ = ["with_attention_held"]


def with_attention_held(local: LocalBlock) -> LocalBlock:
    """Return a block whose attention holds its values until the product after it is there.

    Attention is two products of activations, one after the other: scores, and what weighs values.
    Its values are what both read and the scores.
    """
    states = {state.name for state in local.block.states}
    products = [i for i, op in enumerate(local.ops) if op.op is not None and op.op.kind == "gemm"]
    reads_state = {i: not states.isdisjoint(local.ops[i].inputs) for i in products}
    ops = list(local.ops)
    for first, second in pairwise(products):
        if reads_state[first] or reads_state[second]:
            continue
        end = next((i for i in products if i > second and reads_state[i]), None)
        if end is None:
            continue
        after = ops[end + 1] if end + 1 < len(ops) else None
        if after is not None and after.op is None and after.inputs[0] == ops[end].name:
            end += 1
        held = (ops[first].name, *ops[first].inputs, *ops[second].inputs)
        ops[end] = replace(ops[end], inputs=(*ops[end].inputs, *held))
    return replace(local, ops=tuple(ops))
