"""Tensor-parallel collectives that are cut into pieces beside the products they feed or follow.

Asynchronous tensor parallelism: a gather and the product that reads it, or a product and the
reduce-scatter of its result, become one operator in which a piece moves while the one before it is
multiplied (Wang et al. 2023, Overlap communication with dependent computation via decomposition;
torch, `distributed/_symmetric_memory`, `_fused_all_gather_matmul`, `_fused_matmul_reduce_scatter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.step_costs import slowdown_s
from autoplan.times import OpTime

__all__ = ["beside_products", "left_s"]


def left_s(collective_s: float, product_s: float, pieces: int, slowed: float) -> float:
    """Return by how much a collective makes a product longer that it runs beside in pieces.

    The longer of the two, and one piece of the shorter that nothing runs beside (Wang et al. 2023,
    section 5); the others slow what they run beside (`step_costs.slowdown_s`).

    Args:
        collective_s, product_s: seconds of each by itself.
        pieces: one for each rank.
        slowed: factor on both where they run at once.
    """
    longer_s, shorter_s = max(collective_s, product_s), min(collective_s, product_s)
    alone_s = shorter_s / pieces
    return longer_s + alone_s + slowdown_s(longer_s, shorter_s - alone_s, slowed) - product_s


def beside_products(
    local: LocalBlock, times: Mapping[str, OpTime], degree: int, slowed: float
) -> dict[str, OpTime]:
    """Return the times of a block's ops where its collectives run beside products in pieces.

    A gather's backward is a reduce-scatter of what the products' input gradients give, half of
    their backward, and the other way round.
    """
    by_name = {op.name: op for op in local.ops}
    found = dict(times)
    for op in local.ops:
        if op.transition is None or set(op.transition) != {"all_gather", "reduce_scatter"}:
            continue
        if op.transition[0] == "all_gather":
            partners = [reader for reader in local.ops if op.name in reader.inputs]
        else:
            partners = [by_name[name] for name in op.inputs if name in by_name]
        products = [times[partner.name] for partner in partners if _is_product(partner)]
        if not products:
            continue
        own = times[op.name]
        forward_s = sum(time.forward_s for time in products)
        backward_s = sum(time.backward_s for time in products) / 2
        found[op.name] = replace(
            own,
            forward_comm_s=left_s(own.forward_comm_s, forward_s, degree, slowed),
            backward_comm_s=left_s(own.backward_comm_s, backward_s, degree, slowed),
        )
    return found


def _is_product(op: LocalOp) -> bool:
    return op.op is not None and op.op.kind == "gemm"
