"""How DeepSpeed's ZeRO-1 copies gradients and parameters flat, and its pipeline what it sends.

`runtime/zero/stage2.py` (0.4 to 0.5; `stage_1_and_2.py` later) keeps the gradients of parameters as
they are, copies them into buckets that are reduced, and gathers updated parameters in pieces, each
into one more flat copy. Nothing waits between them, so all copies are there at once.

`runtime/pipe/engine.py` receives into one buffer, which stays, and copies out of it; under tensor
parallelism it sends a slice of the activations per rank and gathers them on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PipeBuffers", "gathered_pieces", "pipe_buffers", "reduced_buckets"]

BUCKET_ELEMENTS = 500_000_000  # `reduce_bucket_size` and `allgather_bucket_size`, the defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeBuffers:
    """Bytes that a stage of the pipeline engine holds of what enters and leaves it.

    Attributes:
        standing: of the buffers for activations and gradients that come, from the first step on.
        received: of each micro-batch in flight: what its forward got a clone of.
        sent: of each micro-batch in flight: its output.
        is_sliced: what is sent is a slice of the output, whose memory goes.
    """

    standing: int = 0
    received: int = 0
    sent: int = 0
    is_sliced: bool = False


def pipe_buffers(entering: int, leaving: int, tp: int) -> PipeBuffers:
    """Return what a stage holds at its borders.

    Follows `_exec_recv_activations`, `_exec_forward_pass` and `_exec_recv_grads`: the clone of
    what was received is the input that blocks keep; a gathered one needs no clone.

    Args:
        entering, leaving: bytes of a micro-batch's activations there.
        tp: tensor-parallel ranks, each of which sends a slice.
    """
    return PipeBuffers(
        standing=-(-entering // tp) - (-leaving // tp),
        received=entering if tp == 1 else 0,
        sent=-(-leaving // tp),
        is_sliced=tp > 1,
    )


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
