"""The memory laws of `docs/design/memory-of-fsdp.md` as a small event model.

All sizes are bytes on one rank, parameters and gradients of one dtype, activations left out. The
model counts what comes on top of the sharded parameters and the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StageSizes", "adamw_extra_bytes", "receive_buffer_bytes", "step_extra_bytes"]

TOGETHER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """Whole (unsharded) parameter bytes of a stage.

    Attributes:
        blocks: of each block, in forward order.
        root: of the glue parameters.
        largest: largest single parameter.
        root_last: last parameter of the root group, whose gradient outlives the copy-in.
        root_early: root gradients that exist from the start of a backward (the head's).
        tensors: of each parameter, in forward order.
    """

    blocks: tuple[int, ...]
    root: int
    largest: int
    root_last: int
    root_early: int
    tensors: tuple[int, ...]


@dataclass(slots=True)
class _Live:
    """Live bytes by kind."""

    gathered: dict[int, int] = field(default_factory=dict)
    all_gather: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    sharded: dict[int, int] = field(default_factory=dict)
    reduce_input: int = 0
    peak: int = 0

    def note(self, extra: int = 0) -> None:
        kinds = (self.gathered, self.all_gather, self.gradients, self.sharded)
        live = sum(sum(kind.values()) for kind in kinds) + self.reduce_input + extra
        self.peak = max(self.peak, live)


def adamw_extra_bytes(sizes: StageSizes, dp: int) -> int:
    """Return the temporaries of AdamW's loop: two tensors like the largest local parameter."""
    return 2 * sizes.largest // dp


def receive_buffer_bytes(
    entering: int, leaving: int, *, in_flight: int, num_microbatches: int, schedule: str
) -> int:
    """Return the receive buffers of a stage, which stay from the first step on.

    The buffer of a micro-batch is its stage input, so it is no activation on top.

    Args:
        entering: bytes of the activations of one micro-batch from the stage before; 0 for stage 0.
        leaving: to the stage after; 0 for the last.
        in_flight: micro-batches of the stage between forward and backward under 1F1B.
        num_microbatches: per step.
        schedule: `1f1b` or `gpipe`.
    """
    if schedule == "gpipe":
        return num_microbatches * (entering + leaving)
    return min(in_flight, num_microbatches) * entering + min(2, num_microbatches) * leaving


def step_extra_bytes(
    sizes: StageSizes,
    *,
    zero_stage: int,
    dp: int,
    num_microbatches: int,
    is_gloo: bool = True,
    is_pipeline: bool = False,
    is_mixed: bool = False,
) -> int:
    """Return the peak of a step, above sharded parameters, optimizer, and receive buffers."""
    if zero_stage == 0 and not is_mixed:
        total = sum(sizes.blocks) + sizes.root
        again = sizes.largest if num_microbatches > 1 else 0
        is_late = is_pipeline or num_microbatches > 1
        return max(total + again, _joining(sizes.tensors, total if is_late else 0))
    live = _Live()
    root = len(sizes.blocks)
    size = [*sizes.blocks, sizes.root]
    half = 2 if is_mixed else 1
    compute = [n // half for n in size]
    early, largest = sizes.root_early // half, sizes.largest // half
    retained = sizes.root_last // half
    for index in range(num_microbatches):
        is_last = index == num_microbatches - 1 and not is_pipeline
        _forward(live, compute, zero_stage, dp if is_mixed else 0)
        syncs = zero_stage > 1 or is_last
        reshards = zero_stage == 3 or is_last
        if zero_stage == 3 and is_pipeline:
            del live.gathered[root]
            live.note(compute[root])
            live.gathered[root] = compute[root]
        accumulated = live.gradients.get(root, 0)
        live.gradients[root] = max(accumulated, early)
        live.note()
        if zero_stage == 3:
            live.all_gather[root - 1] = compute[root - 1]
            live.note()
        for block in reversed(range(root)):
            if zero_stage == 3:
                _gather_backward(live, compute, block)
            _backward(live, size, compute, block, largest, is_mixed)
            if syncs:
                _reduce(live, size, compute, block, dp, reshards, 0, is_gloo, zero_stage)
            elif is_mixed:
                live.gradients[block] = size[block]
        live.gradients[root] = compute[root] + (accumulated if is_mixed else 0)
        live.note()
        if syncs:
            _reduce(live, size, compute, root, dp, reshards, retained, is_gloo, zero_stage)
        elif is_mixed:
            live.gradients[root] = size[root]
        live.reduce_input = 0
    if zero_stage == 1 and is_pipeline:
        for group in (root, *range(root)):
            last = retained if group == root else 0
            _reduce(live, size, compute, group, dp, True, last, is_gloo, zero_stage)
    return live.peak


def _joining(tensors: Sequence[int], existing: int) -> int:
    """Return the most gradients and copies in the buffers that are reduced together.

    Args:
        tensors: of each parameter, in forward order.
        existing: gradients that are there before the first buffer; 0: they are made meanwhile.
    """
    made = waiting = peak = 0
    for index, size in enumerate(reversed(tensors)):
        made += size
        waiting += size
        if waiting >= TOGETHER_BYTES or index == len(tensors) - 1:
            peak = max(peak, max(existing, made) + waiting)
            waiting = 0
    return peak


def _backward(
    live: _Live,
    size: Sequence[int],
    compute: Sequence[int],
    block: int,
    largest: int,
    is_mixed: bool,
) -> None:
    """Make a block's gradients: into the earlier ones, or beside them in another dtype."""
    accumulated = live.gradients.get(block, 0)
    if is_mixed:
        live.gradients[block] = compute[block] + accumulated
        live.note()
        return
    live.gradients[block] = compute[block]
    live.note(largest if accumulated else 0)


def _forward(live: _Live, size: Sequence[int], zero_stage: int, cast_dp: int) -> None:
    root = len(size) - 1
    for group in (root, *range(root)):
        if group not in live.gathered:
            held = dict(live.all_gather)
            if zero_stage > 0:
                live.all_gather[group] = size[group]
                live.note(size[group] // cast_dp if cast_dp else 0)
            live.gathered[group] = size[group]
            live.note()
            for other in held:
                del live.all_gather[other]
        if zero_stage == 3 and group != root:
            del live.gathered[group]
    live.all_gather.clear()


def _gather_backward(live: _Live, size: Sequence[int], block: int) -> None:
    live.gathered[block] = size[block]
    live.note()
    live.all_gather.clear()
    if block > 0:
        live.all_gather[block - 1] = size[block - 1]


def _reduce(
    live: _Live,
    size: Sequence[int],
    compute: Sequence[int],
    group: int,
    dp: int,
    reshards: bool,
    retained: int,
    is_gloo: bool,
    zero_stage: int,
) -> None:
    if reshards:
        del live.gathered[group]
    if compute[group] != size[group] and live.gradients[group] > size[group]:
        live.gradients[group] = size[group]
    live.reduce_input = size[group]
    live.note()
    del live.gradients[group]
    copy = size[group] if is_gloo and zero_stage > 0 else 0
    shard = size[group] // dp if zero_stage > 0 else size[group]
    live.note(shard + copy + retained)
    live.sharded[group] = shard
