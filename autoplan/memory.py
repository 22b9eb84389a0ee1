"""Bytes over time of a pipeline stage on one rank: what is resident and what each instant adds.

The model walks the stage's own schedule, forward and backward of micro-batch after micro-batch,
block by block, and ends with the optimizer step. It counts parameters, gradients, optimizer state,
kept activations, and what comes and goes: gathered copies, all-gather and reduce buffers, and
transients inside blocks. The largest sum is the peak. The laws of FSDP2 it follows are derived and
measured in docs/design/memory-of-fsdp.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.engines import AUTOPLAN, Engine
from autoplan.optimizers import Optimizer
from autoplan.repeated_walk import RepeatedWalk
from autoplan.schedules import MULTI_STAGE, enough_rounds, schedule_actions
from autoplan.settings import Setting
from autoplan.stage_costs import StageBlock
from autoplan.stage_walk import PartBytes, StageWalk
from autoplan.transfers import enough_for_buffers, message_buffers, most_sent

__all__ = [
    "MemorySample",
    "StageMemory",
    "memory_samples",
    "stage_actions",
    "stage_memory",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of a stage: bytes, when, and by category then."""

    peak: int
    instant: str
    by_category: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes of a stage at one place of its step, reserve excluded.

    Attributes:
        action: index of the action; as many as there are actions: the optimizer step.
        block: index of the block that runs; None after the action's last.
        nbytes: most bytes while it runs, or what stays after the action.
    """

    action: int
    block: int | None
    nbytes: int


def stage_memory(
    blocks: Sequence[StageBlock],
    setting: Setting,
    optimizer: Optimizer,
    *,
    stage: int = 0,
    is_mixed: bool = False,
    is_gloo: bool = False,
    input_bytes: int = 0,
    standing_bytes: int = 0,
    parts: Sequence[PartBytes],
    reserve: int = 0,
    engine: Engine = AUTOPLAN,
) -> StageMemory:
    """Return the peak of a rank of the pipeline over all instants.

    Args:
        blocks: in execution order, stage after stage.
        setting: degrees, ZeRO stage, micro-batches, schedule.
        optimizer: its memory law.
        stage: index of the rank, or of its only stage.
        is_mixed: parameters are computed with in another dtype than they are stored in.
        is_gloo: collectives run on gloo, whose reduce-scatter works on a copy.
        input_bytes: batch inputs of one step that stay for the whole step.
        standing_bytes: that the engine holds beside.
        parts: the stages of the rank.
        reserve: bytes set aside on the device.
        engine: the software that trains.
    """
    if engine.has_gradient_buffer:
        # Megatron-LM frees what it has sent, and what it receives is the kept input of a block.
        parts = [replace(part, entering=0, leaving=0, handed=0, returning=0) for part in parts]
    walk = RepeatedWalk(blocks, setting, optimizer, is_mixed, is_gloo, engine, parts)
    walk.fixed = input_bytes + receive_buffer_bytes(parts, setting, stage)
    walk.standing = standing_bytes
    walk.held_after = held_send_after(setting, stage)
    walk.held_gradients = held_gradient_bytes(parts, setting)
    walk.run(stage_actions(setting, stage))
    by_category = {**walk.peak_parts, "reserve": reserve}
    return StageMemory(
        peak=sum(by_category.values()), instant=walk.peak_name, by_category=by_category
    )


def memory_samples(
    blocks: Sequence[StageBlock],
    setting: Setting,
    optimizer: Optimizer,
    actions: Sequence[tuple[str, int]],
    *,
    stage: int = 0,
    is_mixed: bool = False,
    is_gloo: bool = False,
    input_bytes: int = 0,
    parts: Sequence[PartBytes],
) -> tuple[MemorySample, ...]:
    """Return a rank's bytes along its actions, each a kind and which of the rank's stages.

    The largest of them and the reserve make the peak of `stage_memory` for the schedule's actions;
    others as there.
    """
    walk = StageWalk(blocks, setting, optimizer, is_mixed, is_gloo, AUTOPLAN, parts)
    walk.fixed = input_bytes + receive_buffer_bytes(parts, setting, stage)
    walk.held_after = held_send_after(setting, stage)
    walk.held_gradients = held_gradient_bytes(parts, setting)
    samples = walk.samples = {}
    last = {part: index for index, (kind, part) in enumerate(actions) if kind in "BW"}
    walk.run([(kind, index == last[part], part) for index, (kind, part) in enumerate(actions)])
    return tuple(
        MemorySample(action=action, block=block, nbytes=nbytes)
        for (action, block), nbytes in samples.items()
    )


def held_send_after(setting: Setting, stage: int) -> int:
    """Return after how many backwards a rank holds an output whose micro-batch is done; 0: never.

    The last send of a warm-up is waited for again after the last forward only (torch,
    `Schedule1F1B._step_microbatches`, `send_work`), and a send may hold its tensor (seen on gloo
    for some models, not for all). Where the schedule is long enough for that to come on top of all
    micro-batches in flight, it counts from the first backward on, since the actions that repeat
    themselves are left out.
    """
    if setting.schedule != "1f1b":
        return 0
    warm_up = setting.live()[stage]
    return 1 if warm_up >= 2 and 2 * warm_up - 1 <= setting.num_microbatches else 0


def held_gradient_bytes(parts: Sequence[PartBytes], setting: Setting) -> int:
    """Return the bytes of gradients on their way back that a rank holds from its first backward on.

    One micro-batch's, beside all that is there in later forwards and backwards: torch keeps the
    operations that send it until those of the next backward take their place (torch 2.13,
    `distributed/pipelining/schedules.py`, `bwd_sends` in `Schedule1F1B._step_microbatches`, in
    warm-down too, and `ops` in `ScheduleGPipe._step_microbatches`). Schedules of several stages a
    rank count what they have sent with their receive buffers.
    """
    if setting.schedule in MULTI_STAGE:
        return 0
    return sum(part.returning for part in parts)


def receive_buffer_bytes(parts: Sequence[PartBytes], setting: Setting, stage: int) -> int:
    """Return the receive buffers of a rank, which stay from the first step on.

    A ring under 1F1B, one per micro-batch under GPipe, and what the messages of the list need under
    schedules of several stages a rank, gradients on their way included; gradients that come back
    have the size of the activations that left.
    """
    m = setting.num_microbatches
    if not any(part.entering or part.leaving for part in parts):
        return 0
    if setting.schedule in MULTI_STAGE:
        pp, v = setting.pp, len(parts)
        sent = min(m, most_sent(pp, v))
        total = 0
        sizes = message_buffers(setting.schedule, pp, enough_for_buffers(m, pp), v)
        for part, own in zip(parts, sizes[stage::pp], strict=True):
            received = min(m, own.activations) * part.entering
            total += received + sent * part.returning + min(m, own.gradients) * part.leaving
        return total
    (only,) = parts
    if setting.schedule == "gpipe":
        return m * (only.entering + only.leaving)
    return setting.live()[stage] * only.entering + min(2, m) * only.leaving


def stage_actions(setting: Setting, stage: int) -> list[tuple[str, bool, int]]:
    """Return the stage's forwards and backwards in order: kind, is it the last one, part.

    A schedule repeats itself after its warm-up, so micro-batches that change nothing are left out.
    """
    m = setting.num_microbatches
    if setting.schedule in MULTI_STAGE:
        m = enough_rounds(m, setting.pp)
    elif setting.schedule != "gpipe":
        m = min(m, setting.live()[stage] + 2)
    listed = schedule_actions(setting.schedule, setting.pp, m, setting.virtual_stages)[stage]
    return [(a.kind, a.microbatch == m - 1, a.stage // setting.pp) for a in listed]
