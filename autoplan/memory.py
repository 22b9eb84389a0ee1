"""Bytes over time of a pipeline stage on one rank: what is resident and what each instant adds.

The model walks the stage's own schedule, forward and backward of micro-batch after micro-batch,
block by block, and ends with the optimizer step. It counts parameters, gradients, optimizer state,
kept activations, and what comes and goes: gathered copies, all-gather and reduce buffers, and
transients inside blocks. The largest sum is the peak. The laws of FSDP2 it follows are derived and
measured in docs/design/memory-of-fsdp.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.engines import AUTOPLAN, Engine
from autoplan.schedules import schedule_actions
from autoplan.settings import Optimizer, Setting
from autoplan.stage_costs import GroupBytes, StageBlock

__all__ = [
    "GroupBytes",
    "MemorySample",
    "StageBlock",
    "StageMemory",
    "memory_samples",
    "stage_actions",
    "stage_memory",
    "static_bytes",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """What a group of parameters holds all the time, by category."""

    parameters: int
    gradients: int
    optimizer: int


def uses_fsdp(setting: Setting, is_mixed: bool) -> bool:
    """Return whether parameters are gathered: ZeRO 1 to 3, another stored dtype, or from the host.

    ZeRO 0 holds whole parameters only once and reduces gradients in place.
    """
    is_sharded = setting.dp > 1 and setting.zero_stage >= 1
    return is_sharded or is_mixed or setting.offload != "none"


def static_bytes(
    group: GroupBytes, setting: Setting, optimizer: Optimizer, engine: Engine = AUTOPLAN
) -> StaticBytes:
    """Return the resident bytes of a group under a ZeRO stage; shares round up.

    Shards on the host take nothing of the device.

    With a gradient buffer, parameters lie whole in the dtype of the computation and gradients whole
    beside them; a copy in the stored dtype, where that is another, belongs to the optimizer:
    2 + 4 bytes per bfloat16 parameter and 12 / dp of ZeRO-1 (Megatron-LM, distributed optimizer).
    """
    if setting.offload != "none":
        return StaticBytes(parameters=0, gradients=0, optimizer=0)
    shards = setting.shards
    states = int(group.trained * optimizer.state_bytes_per_byte)
    if engine.has_gradient_buffer:
        copy = group.trained if group.stored > group.gathered else 0
        return StaticBytes(
            parameters=min(group.stored, group.gathered + group.stored - group.trained),
            gradients=group.trained if engine.is_gradient_wide else group.gathered_grads,
            optimizer=-(-(states + copy) // shards),
        )
    return StaticBytes(
        parameters=-(-group.stored // shards),
        gradients=-(-group.trained // shards),
        optimizer=-(-states // shards),
    )


def stage_memory(
    blocks: Sequence[StageBlock],
    setting: Setting,
    optimizer: Optimizer,
    *,
    stage: int = 0,
    is_mixed: bool = False,
    is_gloo: bool = False,
    side_bytes: int = 0,
    input_bytes: int = 0,
    standing_bytes: int = 0,
    entering: int = 0,
    leaving: int = 0,
    reserve: int = 0,
    engine: Engine = AUTOPLAN,
) -> StageMemory:
    """Return the peak of a stage over all instants.

    Args:
        blocks: in execution order.
        setting: degrees, ZeRO stage, micro-batches, schedule.
        optimizer: its memory law.
        stage: index of the stage.
        is_mixed: parameters are computed with in another dtype than they are stored in.
        is_gloo: collectives run on gloo, whose reduce-scatter works on a copy.
        side_bytes: side values held by one micro-batch.
        input_bytes: batch inputs of one step that stay for the whole step.
        standing_bytes: that the engine holds beside.
        entering: bytes of one micro-batch's activations from the stage before.
        leaving: to the stage after.
        reserve: bytes set aside on the device.
        engine: the software that trains.
    """
    walk = _Walk(blocks, setting, optimizer, is_mixed, is_gloo, engine)
    walk.side, walk.fixed, walk.standing = side_bytes, input_bytes, standing_bytes
    if not engine.has_gradient_buffer:
        # Megatron-LM frees what it has sent, and what it receives is the kept input of a block.
        walk.entering, walk.leaving = entering, leaving
        walk.fixed += receive_buffer_bytes(entering, leaving, setting, stage)
    walk.run(stage_actions(setting, stage))
    by_category = {**walk.peak_parts, "reserve": reserve}
    return StageMemory(
        peak=sum(by_category.values()), instant=walk.peak_name, by_category=by_category
    )


def memory_samples(
    blocks: Sequence[StageBlock],
    setting: Setting,
    optimizer: Optimizer,
    actions: Sequence[str],
    *,
    stage: int = 0,
    is_mixed: bool = False,
    is_gloo: bool = False,
    side_bytes: int = 0,
    input_bytes: int = 0,
    entering: int = 0,
    leaving: int = 0,
) -> tuple[MemorySample, ...]:
    """Return a stage's bytes along its actions, each `F` or `B`; others as in `stage_memory`.

    The largest of them and the reserve make the peak of `stage_memory` for the schedule's actions.
    """
    walk = _Walk(blocks, setting, optimizer, is_mixed, is_gloo, AUTOPLAN)
    walk.entering, walk.leaving, walk.side = entering, leaving, side_bytes
    walk.fixed = input_bytes + receive_buffer_bytes(entering, leaving, setting, stage)
    backwards = [index for index, kind in enumerate(actions) if kind == "B"]
    walk.run([(kind, index == backwards[-1], 0) for index, kind in enumerate(actions)])
    return tuple(
        MemorySample(action=action, block=block, nbytes=nbytes)
        for (action, block), nbytes in walk.samples.items()
    )


def receive_buffer_bytes(entering: int, leaving: int, setting: Setting, stage: int) -> int:
    """Return the receive buffers of a stage, which stay from the first step on.

    A ring under 1F1B, one per micro-batch under GPipe; gradients that come back have the size of
    the activations that left.
    """
    m = setting.num_microbatches
    if setting.schedule == "gpipe":
        return m * (entering + leaving)
    return setting.live()[stage] * entering + min(2, m) * leaving


def stage_actions(setting: Setting, stage: int) -> list[tuple[str, bool, int]]:
    """Return the stage's forwards and backwards in order: kind, is it the last one, part.

    A schedule repeats itself after its warm-up, so micro-batches that change nothing are left out.
    """
    m = setting.num_microbatches
    if setting.virtual_stages > 1:
        m = min(m, _INTERLEAVED_GROUPS * setting.pp)
    elif setting.schedule != "gpipe":
        m = min(m, setting.live()[stage] + 2)
    parts = setting.virtual_stages
    schedule = "interleaved" if parts > 1 else setting.schedule
    listed = schedule_actions(schedule, setting.pp, m, parts)[stage]
    return [(a.kind, a.microbatch == m - 1, a.stage // setting.pp) for a in listed]


_INTERLEAVED_GROUPS = 3  # of pp micro-batches: two warm up at most


_BUFFER = -1  # the gradient buffer among the groups


class _Walk:
    """Live bytes while a stage runs; `note` keeps the largest sum with its parts."""

    def __init__(
        self,
        blocks: Sequence[StageBlock],
        setting: Setting,
        optimizer: Optimizer,
        is_mixed: bool,
        is_gloo: bool,
        engine: Engine,
    ) -> None:
        self.blocks = blocks
        self.has_buffer = engine.has_gradient_buffer
        self.setting = setting
        self.zero = setting.zero_stage
        self.is_mixed = is_mixed
        self.is_gloo = is_gloo
        self.is_pipeline = setting.pp > 1
        self.is_offloaded = setting.offload != "none"
        self.is_foreach = optimizer.is_foreach
        self.wrapped = uses_fsdp(setting, is_mixed) and not self.has_buffer
        statics = [static_bytes(b.group, setting, optimizer, engine) for b in blocks]
        self.parameters = sum(s.parameters for s in statics)
        self.optimizer = sum(s.optimizer for s in statics)
        self.largest = max((b.group.largest for b in blocks), default=0)
        self.root = len(blocks)
        groups: dict[int, list[GroupBytes]] = {}
        for index, block in enumerate(blocks):
            groups.setdefault(self.root if block.is_glue else index, []).append(block.group)
        self.stored = {k: sum(g.stored for g in v) for k, v in groups.items()}
        self.compute = {k: sum(g.gathered for g in v) for k, v in groups.items()}
        self.grads = {k: sum(g.gathered_grads for g in v) for k, v in groups.items()}
        self.whole = {k: sum(g.trained for g in v) for k, v in groups.items()}
        self.retained = next((b.group.largest for b in reversed(blocks) if b.is_glue), 0)
        self.order = [k for k in range(self.root) if k in groups]
        if self.root in groups:
            self.order.insert(0, self.root)
        self.side = self.fixed = self.standing = self.entering = self.leaving = 0
        self.activations = 0
        self.gathered: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        if self.has_buffer:
            self.gradients[_BUFFER] = sum(s.gradients for s in statics)
        self.is_flat = engine.is_flat
        self.copies_gathered = engine.copies_gathered
        self.widens = is_mixed and not engine.is_gradient_wide
        last = max((i for i, b in enumerate(blocks) if not b.is_glue), default=None)
        self.stays_gathered = last if engine.keeps_last_gathered and setting.pp == 1 else None
        parts = setting.virtual_stages
        self.parts = [
            range(len(blocks) * part // parts, len(blocks) * (part + 1) // parts)
            for part in range(parts)
        ]
        self.sharded: dict[int, int] = {}
        self.reduce_input = 0
        self._marks: set[str] = set()
        self.unmerged = 0
        self.at: tuple[int, int | None] = (0, 0)
        self.samples: dict[tuple[int, int | None], int] = {}
        self.peak = -1
        self.peak_name = ""
        self.peak_parts: dict[str, int] = {}

    def note(self, name: str, transient: int = 0) -> None:
        """Compare what lives now, and a transient, with the peak so far."""
        gradients = sum(self.gradients.values()) + sum(self.sharded.values()) + self.unmerged
        gradients += self.standing
        working = sum(self.gathered.values()) + sum(self.buffers.values()) + self.reduce_input
        total = self.activations + gradients + working + transient + self.fixed
        total += self.parameters + self.optimizer
        self.samples[self.at] = max(self.samples.get(self.at, 0), total)
        if total > self.peak:
            self.peak = total
            self.peak_name = name
            self.peak_parts = {
                "parameters": self.parameters,
                "gradients": gradients,
                "optimizer": self.optimizer,
                "activations": self.activations + self.fixed,
                "working": working + transient,
            }

    def run(self, actions: Sequence[tuple[str, bool, int]]) -> None:
        """Walk the actions, the last reductions, and the optimizer step."""
        for number, (kind, is_last, part) in enumerate(actions):
            blocks = self.parts[part]
            self.at = (number, blocks[0] if kind == "F" else blocks[-1])
            if kind == "F":
                self._forward(self.parts[part])
            else:
                self._backward(is_last, self.parts[part])
            self.at = (number, None)
            self.note("between micro-batches")
        self.at = (len(actions), None)
        if self.wrapped and self.zero <= 1 and self.is_pipeline:
            for group in self.order:
                self._reduce(group, reshards=True)
        self.gathered.clear()
        self.buffers.clear()
        self.reduce_input = 0
        shards = self.setting.shards
        temporary = sum(self.whole.values()) if self.is_foreach else 2 * self.largest
        if self.has_buffer and not self.is_foreach:
            # One fused kernel over all parameters, on gradients as wide as they are.
            temporary = sum(self.whole.values()) if self.widens else 0
        if self.is_flat:
            self.note("reducing gradients", sum(self.grads.values()))
        self.note("the optimizer step", 0 if self.is_offloaded else -(-temporary // shards))

    def _forward(self, part: range) -> None:
        self._gather_forward(self.root)
        self.activations += self.side
        for index in part:
            block = self.blocks[index]
            self.at = (self.at[0], index)
            self._gather_forward(index)
            self.note(f"forward of block {index}", block.input_bytes + block.memory.forward_peak)
            self.activations += block.own_kept
            if self.zero == 3 and index in self.compute and index != self.stays_gathered:
                self.gathered.pop(index, None)
        self.activations += self._leaving_added()
        if self.is_pipeline:
            self.activations -= self._entering_kept()
        self.buffers.clear()
        if self.zero == 3 and self.is_pipeline:
            self.gathered.pop(self.root, None)

    def _entering_kept(self) -> int:
        """Return the kept stage input: it is the receive buffer, which is counted there."""
        first = self.blocks[0]
        return min(self.entering, first.input_bytes, first.memory.kept)

    def _leaving_added(self) -> int:
        """Return the bytes of the stage output that its last block does not keep anyway."""
        return max(0, self.leaving - self.blocks[-1].memory.held_output_bytes)

    def _gather_forward(self, group: int) -> None:
        if not self.wrapped or group not in self.compute or group in self.gathered:
            return
        size = self.compute[group]
        earlier = list(self.buffers)
        if self.zero > 0 and self.setting.dp > 1:
            self.buffers[group] = size
            copied = size // self.setting.dp_shard if self.is_mixed else 0
            self.note("gathering parameters", copied + self._copied_in(group))
        self.gathered[group] = size
        if not self.copies_gathered:
            self.buffers.pop(group, None)
        self.note("gathering parameters", 0 if self.setting.dp > 1 else self._copied_in(group))
        for other in earlier:
            del self.buffers[other]

    def _copied_in(self, group: int) -> int:
        """Return the bytes of a shard that comes from the host for a gather."""
        return -(-self.stored[group] // self.setting.dp_shard) if self.is_offloaded else 0

    def _backward(self, is_last: bool, part: range) -> None:
        syncs = self.wrapped and (self.zero >= 2 or (is_last and not self.is_pipeline))
        reshards = self.zero == 3 or (is_last and not self.is_pipeline)
        self.activations += self._entering_kept() if self.is_pipeline else 0
        if self.wrapped and self.zero == 3:
            self._gather_backward(self.root)
            self._prefetch(len(self.blocks))
        before = self.gradients.get(self.root, 0)
        for index in reversed(part):
            block = self.blocks[index]
            self.at = (self.at[0], index)
            if self.wrapped and self.zero == 3 and not block.is_glue:
                self._gather_backward(index)
                self._prefetch(index)
            self._backward_of(index, block)
            if syncs and index in self.compute:
                self._reduce(index, reshards)
        if syncs and self.root in self.compute:
            self._reduce(self.root, reshards, self.retained)
        elif self.is_mixed and self.root in self.gradients:
            self.gradients[self.root] = max(before, self.whole[self.root])
        self.activations -= self.side + self._leaving_added()
        self.reduce_input = 0
        self.unmerged = 0

    def _backward_of(self, index: int, block: StageBlock) -> None:
        if self.has_buffer:
            transient = block.accumulating.backward_peak - block.accumulating.kept
            self.note(f"backward of block {index}", transient)
            self.activations -= block.memory.kept
            return
        group = self.root if block.is_glue else index
        has_grads = self.gradients.get(index if not block.is_glue else self.root, 0) > 0
        is_first = not has_grads or self.is_mixed
        seen = f"grads of {index}"
        adds_up = block.is_glue and seen in self._marks
        memory = block.memory if is_first and not adds_up else block.accumulating
        self.note(f"backward of block {index}", memory.backward_peak - memory.kept)
        self.activations -= block.own_kept
        # Autograd adds up all gradients of a shared parameter before it touches the one there is.
        self.unmerged += block.group.early_grads - block.group.late_grads
        if not adds_up:
            made = block.group.gathered_grads
            if not block.is_glue and has_grads and not self.is_mixed:
                made = 0
            self.gradients[group] = self.gradients.get(group, 0) + made
            self.note(f"end of the backward of block {index}")
            if block.is_glue and not self.is_mixed:
                self._marks.add(seen)
        if self.is_mixed and self.wrapped and not block.is_glue and self.zero <= 1:
            self.gradients[group] = self.whole[group]

    def _gather_backward(self, group: int) -> None:
        if group in self.compute and group not in self.gathered:
            self.gathered[group] = self.compute[group]
            self.note("gathering parameters for backward", self._copied_in(group))
        self.buffers.clear()

    def _prefetch(self, index: int) -> None:
        earlier = next((i for i in reversed(range(index)) if i in self.compute), None)
        if earlier is not None and earlier not in self.gathered and self.setting.dp > 1:
            self.buffers[earlier] = self.compute[earlier]
            self.note("prefetching parameters", self._copied_in(earlier))

    def _reduce(self, group: int, reshards: bool, retained: int = 0) -> None:
        if reshards:
            self.gathered.pop(group, None)
        size = self.whole[group] if self.is_mixed else self.grads[group]
        self.reduce_input = size
        self.note("reducing gradients")
        self.gradients.pop(group, None)
        self._marks = {m for m in self._marks if group != self.root}
        copy = size if self.is_gloo and self.zero > 0 else 0
        shard = (
            -(-self.whole[group] // self.setting.dp_shard) if self.zero > 0 else self.whole[group]
        )
        self.note("reducing gradients", shard + copy + retained)
        self.sharded[group] = 0 if self.is_offloaded else shard
