"""A bound of a pipeline from what all its ranks hold together, before anything is cut.

With M micro-batches, multipliers w[r] >= 1 that sum to ranks + M - 1, and a price of memory, for
any assignment of blocks to ranks

    sum_r T[r] + (M - 1) max_r T[r]  >=  sum_r w[r] T[r]
    >=  sum_b min_r w[r] min_o (time + price (static + live[r] kept))[b,o]
        + sum_r w[r] (boundary[r] - price room[r])

by weak duality: the slowest rank is at least any mean of all, and what is held fits the room. Ranks
that keep more micro-batches get less weight, as blocks there cost more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.search.detours import block_minima, least_once
from autoplan.search.problem import Run
from autoplan.search.stage import memory_prices, option_columns

__all__ = ["together_bound"]

_SLACK = 1e-9  # taken off for floating point, relative


def together_bound(
    runs: Sequence[Run],
    live: Sequence[float],
    room: Sequence[int],
    boundary: Sequence[int],
    num_microbatches: int,
) -> int | None:
    """Return ticks below which no pipeline of these ranks is, or None if they cannot hold it.

    Args:
        runs: the blocks, in any order.
        live: micro-batches alive at once per rank.
        room: memory units per rank.
        boundary: ticks per micro-batch that each rank spends at its borders at least.
        num_microbatches: at least 1.
    """
    counts = np.array([run.count for run in runs], dtype=np.float64)
    blocks = [run.options for run in runs]
    alive, place = np.unique(np.array(live, dtype=np.float64), return_inverse=True)
    ranks = np.bincount(place).astype(np.float64)
    own_room = np.bincount(place, weights=np.array(room, dtype=np.float64))
    own_boundary = np.bincount(place, weights=np.array(boundary, dtype=np.float64))
    times, static, kept = option_columns(blocks)
    held = static + alive[:, None, None] * kept
    if (counts * block_minima(runs, held[0])).sum() > own_room.sum() * (1 + _SLACK):
        return None
    extra = num_microbatches - 1
    prices = np.array([0.0, *memory_prices(times, held[len(alive) // 2])])[:, None]
    # [price, alive, run], [price, alive] and [price]
    costs = block_minima(runs, times + prices[:, :, None, None] * held)
    inverse = 1 / np.maximum((counts * costs).sum(axis=2), 1.0)
    mean = (ranks * inverse).sum(axis=1, keepdims=True)
    weights: NDArray[np.float64] = 1 + extra * inverse / mean
    blocks_cost = (counts * (weights[:, :, None] * costs).min(axis=1)).sum(axis=1)
    paid = (weights * (own_boundary - prices * own_room)).sum(axis=1)
    slack = _SLACK * (blocks_cost + (weights * prices * own_room).sum(axis=1))
    bound = max(0.0, float((blocks_cost + paid - slack).max()))
    once = sum(run.count * least_once(run) for run in runs)
    return int(bound) + once // len(live)
