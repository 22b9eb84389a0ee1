"""How DeepSpeed's ZeRO-1 copies gradients and parameters flat around its collectives.

`runtime/zero/stage2.py` (0.4 to 0.5; `stage_1_and_2.py` later) keeps the gradients of parameters as
they are, copies them into buckets that are reduced, and gathers updated parameters in pieces, each
into one more flat copy. Nothing waits between them, so all copies are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["gathered_pieces", "reduced_buckets"]

BUCKET_ELEMENTS = 500_000_000  # `reduce_bucket_size` and `allgather_bucket_size`, the defaults


def reduced_buckets(elements: Sequence[int]) -> list[int]:
    """Return the elements of each bucket, for parameters of so many elements in their order.

    Follows `reduce_independent_p_g_buckets_and_remove_grads`.
    """
    buckets: list[int] = []
    for count in elements:
        if buckets and buckets[-1] + count <= BUCKET_ELEMENTS:
            buckets[-1] += count
        else:
            buckets.append(count)
    return buckets


def gathered_pieces(elements: int, shards: int) -> list[int]:
    """Return the elements of each piece in which parameters are gathered from so many ranks.

    Follows the end of `step`.
    """
    share = -(-elements // shards)
    pieces = max(1, share * shards // BUCKET_ELEMENTS)
    size = share // pieces
    return [size * shards] * (pieces - 1) + [(share - size * (pieces - 1)) * shards]
