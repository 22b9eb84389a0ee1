"""The bytes of a pipeline stage, action by action, and the largest sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autoplan.engines import Engine
from autoplan.optimizers import Optimizer
from autoplan.resident import (
    REDUCED_TOGETHER_BYTES,
    live_bytes,
    reduced_bytes,
    static_bytes,
    uses_fsdp,
)
from autoplan.settings import Setting
from autoplan.stage_costs import GroupBytes, StageBackward, StageBlock

__all__ = ["PartBytes", "Sizes", "StageWalk"]

_BUFFER = -1  # the gradient buffer among the groups
_PARAMETERS = {"split": "W", "late": "W", "whole": "I"}  # the action that is a stage's backward


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """What one of the stages of a rank holds beside its blocks.

    Attributes:
        num_blocks: of the rank's blocks, in order.
        side: side values held by one micro-batch.
        entering: bytes of one micro-batch's activations from the stage before.
        leaving: to the stage after.
        handed: of those, what entered and is sent on as it is: it lies in its receive buffer.
        returning: bytes of one micro-batch's gradients to the stage before.
        backward: how it runs where the schedule splits backwards.
    """

    num_blocks: int
    side: int = 0
    entering: int = 0
    leaving: int = 0
    handed: int = 0
    returning: int = 0
    backward: StageBackward = "split"


class Sizes(dict[int, int]):
    """Bytes by group, with their sum: it is asked for far more often than they change."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __setitem__(self, key: int, nbytes: int) -> None:
        self.total += nbytes - self.get(key, 0)
        super().__setitem__(key, nbytes)

    def __delitem__(self, key: int) -> None:
        self.let_go(key)

    def let_go(self, key: int) -> None:
        """Forget the bytes of a group, if there are any."""
        self.total -= self.pop(key, 0)

    def clear(self) -> None:
        super().clear()
        self.total = 0

    def copied(self) -> Sizes:
        """Return the same bytes by group."""
        copied = Sizes()
        copied.become(self)
        return copied

    def become(self, other: Sizes) -> None:
        """Take the bytes of others for what is here."""
        super().clear()
        self.update(other)
        self.total = other.total


class StageWalk:
    """Live bytes while a stage runs; `note` keeps the largest sum with its parts.

    Where `samples` is a mapping, it gets the largest sum at each place of a step.
    """

    def __init__(
        self,
        blocks: Sequence[StageBlock],
        setting: Setting,
        optimizer: Optimizer,
        is_mixed: bool,
        is_gloo: bool,
        engine: Engine,
        parts: Sequence[PartBytes],
    ) -> None:
        self.blocks = blocks
        ends = list(accumulate(part.num_blocks for part in parts))
        self.parts = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
        self.part_bytes = parts
        self.has_buffer = engine.has_gradient_buffer
        self.border = [0 if self.has_buffer else b.border_bytes for b in blocks]
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
        groups: dict[int, list[GroupBytes]] = {}
        self.order: list[int] = []
        for number, part in enumerate(self.parts):
            root = len(blocks) + number
            for index in part:
                key = root if blocks[index].is_glue else index
                groups.setdefault(key, []).append(blocks[index].group)
            self.order += [k for k in (root, *part) if k in groups]
        self.stored = {k: sum(g.stored for g in v) for k, v in groups.items()}
        self.compute = {k: sum(g.gathered for g in v) for k, v in groups.items()}
        self.grads = {k: sum(g.gathered_grads for g in v) for k, v in groups.items()}
        self.whole = {k: sum(g.trained for g in v) for k, v in groups.items()}
        self.reduced = {
            k: sum(reduced_bytes(g, engine, is_mixed=is_mixed) for g in v)
            for k, v in groups.items()
        }
        self.live = live_bytes(engine, setting, self.compute.values())
        self.fixed = self.standing = self.held_after = self.held_gradients = 0
        self.activations = 0
        self.later: dict[int, int] | None = None  # what a backward to the parameters has less
        self.gathered = Sizes()
        self.buffers = Sizes()
        self.gradients = Sizes()
        if self.has_buffer:
            self.gradients[_BUFFER] = sum(s.gradients for s in statics)
        self.is_flat = engine.is_flat
        is_alone = self.has_buffer or self.is_flat or engine.bucket_elements > 0
        self.joins = setting.dp > 1 and self.zero == 0 and not (self.wrapped or is_alone)
        self.waiting = 0
        self.copies_gathered = engine.copies_gathered
        self.steps_in_backward = engine.steps_in_backward
        self.widens = is_mixed and not engine.is_gradient_wide
        last = max((i for i, b in enumerate(blocks) if not b.is_glue), default=None)
        self.stays_gathered = last if engine.keeps_last_gathered and setting.pp == 1 else None
        self.enter(0)
        self.sharded = Sizes()
        self.reduce_input = 0
        self.marks: set[str] = set()
        self.unmerged = 0
        self.at: tuple[int, int | None] = (0, 0)
        self.samples: dict[tuple[int, int | None], int] | None = None
        self.peak = -1
        self.peak_name = ""
        self.peak_parts: dict[str, int] = {}

    def enter(self, part: int) -> None:
        """Make one of the rank's stages the one that runs."""
        own = self.part_bytes[part]
        self.root = len(self.blocks) + part
        self.side, self.leaving, self.returning = own.side, own.leaving, own.returning
        self.sent = own.leaving - own.handed
        self.how = own.backward
        self.part = self.parts[part]
        glue = (self.blocks[i].group.largest for i in reversed(self.part) if self.blocks[i].is_glue)
        self.retained = next(glue, 0)

    def note(self, name: str, transient: int = 0) -> None:
        """Compare what lives now, and a transient, with the peak so far."""
        gradients = self.gradients.total + self.sharded.total + self.unmerged
        gradients += self.standing
        gathered = self.gathered.total + self.buffers.total
        working = max(gathered, self.live) + self.reduce_input
        total = self.activations + gradients + working + transient + self.fixed
        total += self.parameters + self.optimizer
        if self.samples is not None and total >= self.samples.get(self.at, 0):
            self.samples[self.at] = total
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
        backwards = total_held = 0
        for number, (kind, is_last, part) in enumerate(actions):
            is_backward = kind == "B" or kind == _PARAMETERS[self.part_bytes[part].backward]
            backwards += is_backward
            held = 0
            if is_backward and backwards == self.held_after:
                held += self.part_bytes[part].leaving - self.part_bytes[part].handed
            if is_backward and backwards == 1:
                held += self.held_gradients
            total_held += held
            self.at = (number, None)
            self.act(kind, is_last, part, held)
        self.settle()
        self.fixed -= total_held
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
        if self.joins:
            waiting = self.gradients.total if self.is_pipeline else self.waiting
            self.note("reducing gradients", min(waiting, REDUCED_TOGETHER_BYTES))
        self.note("the optimizer step", 0 if self.is_offloaded else -(-temporary // shards))

    def act(self, kind: str, is_last: bool, part: int, held: int) -> None:
        """Walk one action of one of the rank's stages.

        Args:
            kind, is_last, part: as in `run`.
            held: bytes of what is sent that the rank holds from the end of it on, see
                `memory.held_send_after` and `memory.held_gradient_bytes`.
        """
        self.enter(part)
        self.at = (self.at[0], self.part[0] if kind == "F" else self.part[-1])
        if kind == "F":
            self._forward(self.part)
        elif kind == "I" and self.how == "split":
            self._input_backward()
        elif kind == "B" or kind == _PARAMETERS[self.how]:
            self.later = self._released() if kind == "W" and self.how == "split" else None
            self._backward(is_last, self.part)
        self.fixed += held
        self.at = (self.at[0], None)
        self.note("between micro-batches")

    def settle(self) -> None:
        """Bring everything up to date after the last action; for walks that put something off."""

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
                self.gathered.let_go(index)
        self.activations += self.sent - sum(self.border[i] for i in part)
        self.buffers.clear()
        if self.zero == 3 and self.is_pipeline:
            self.gathered.let_go(self.root)

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
            self.buffers.let_go(group)
        self.note("gathering parameters", 0 if self.setting.dp > 1 else self._copied_in(group))
        for other in earlier:
            del self.buffers[other]

    def _copied_in(self, group: int) -> int:
        """Return the bytes of a shard that comes from the host for a gather."""
        return -(-self.stored[group] // self.setting.dp_shard) if self.is_offloaded else 0

    def _backward(self, is_last: bool, part: range) -> None:
        syncs = self.wrapped and (self.zero >= 2 or (is_last and not self.is_pipeline))
        reshards = self.zero == 3 or (is_last and not self.is_pipeline)
        if self.wrapped and self.zero == 3:
            self._gather_backward(self.root)
            self._prefetch(part[-1] + 1)
        before = self.gradients.get(self.root, 0)
        for index in reversed(part):
            block = self.blocks[index]
            self.at = (self.at[0], index)
            if self.wrapped and self.zero == 3 and not block.is_glue:
                self._gather_backward(index)
                self._prefetch(index)
            joins = self.joins and is_last and not self.is_pipeline
            made = block.group.gathered_grads if joins else 0
            is_full = self.waiting + made >= REDUCED_TOGETHER_BYTES
            self._backward_of(index, block, REDUCED_TOGETHER_BYTES // 2 if is_full else 0)
            self.waiting = (self.waiting + made) % REDUCED_TOGETHER_BYTES
            if is_full:  # the last buffer was full before what waits now was made
                self.note("reducing gradients", REDUCED_TOGETHER_BYTES - self.waiting)
            if syncs and index in self.compute:
                self._reduce(index, reshards)
        returning = 0 if self.later is not None else self.returning
        self.activations += returning
        if syncs and self.root in self.compute:
            self._reduce(self.root, reshards, self.retained)
        elif self.is_mixed and self.root in self.gradients:
            self.gradients[self.root] = max(before, self.whole[self.root])
        self.activations -= self.side + self.sent + returning
        self.reduce_input = 0
        self.unmerged = 0

    def _input_backward(self) -> None:
        """Walk a backward to the inputs: what it keeps goes with the backward to the parameters.

        Autograd holds its graph from the last op that reads parameters on, whether the parameters
        need it or not, and the gradients of the results of all such ops come on top.
        """
        released = self._released()
        for index in reversed(self.part):
            block = self.blocks[index]
            self.at = (self.at[0], index)
            memory = block.accumulating
            peak = memory.border_backward_peak if self._is_sent(index) else memory.backward_peak
            transient = peak - memory.kept + block.carried_bytes
            self.note(f"backward of block {index} to its inputs", transient)
            self.activations += block.deferred_bytes
        self.activations -= sum(released.values())

    def _released(self) -> dict[int, int]:
        """Return per block of the stage what it lets go of when its backward to the inputs ends."""
        released = {}
        for index in reversed(self.part):
            block = self.blocks[index]
            whole = block.own_kept - self.border[index]
            released[index] = (
                max(0, block.released_bytes - self.border[index]) if block.deferred_bytes else whole
            )
            if block.deferred_bytes:
                break
        return released

    def _backward_of(self, index: int, block: StageBlock, joined: int) -> None:
        """Walk the backward of a block.

        `joined`: half of a buffer into which gradients are copied meanwhile to be reduced: it is
        there at some point between the peak and the end, of which neither is told by sizes alone.
        """
        extra = 0
        if self.later is not None:
            extra = block.deferred_bytes - self.later.get(index, 0)
        if self.has_buffer:
            transient = block.accumulating.backward_peak - block.accumulating.kept
            self.note(f"backward of block {index}", transient)
            self.activations -= block.own_kept + extra
            return
        group = self.root if block.is_glue else index
        has_grads = self.gradients.get(index if not block.is_glue else self.root, 0) > 0
        is_first = not has_grads or self.is_mixed
        seen = f"grads of {index}"
        adds_up = block.is_glue and seen in self.marks
        memory = block.memory if is_first and not adds_up else block.accumulating
        peak = memory.border_backward_peak if self._is_sent(index) else memory.backward_peak
        transient = peak - memory.kept
        if self.later is not None:
            whole = block.memory.parameter_grads
            transient = whole if memory is block.memory else min(whole, block.group.largest)
        self.note(f"backward of block {index}", transient + joined + block.carried_bytes)
        self.activations -= block.own_kept - self.border[index] + extra
        # Autograd adds up all gradients of a shared parameter before it touches the one there is.
        self.unmerged += block.group.early_grads - block.group.late_grads
        if not adds_up:
            made = block.group.gathered_grads
            if not block.is_glue and has_grads and not self.is_mixed:
                made = 0
            self.gradients[group] = self.gradients.get(group, 0) + made
            self.note(f"end of the backward of block {index}")
            if block.is_glue and not self.is_mixed:
                self.marks.add(seen)
        if self.steps_in_backward:
            self.gradients.let_go(group)
        if self.is_mixed and self.wrapped and not block.is_glue and self.zero <= 1:
            self.gradients[group] = self.whole[group]

    def _is_sent(self, index: int) -> bool:
        """Return whether what a block makes leaves the stage: its last block's results do."""
        return self.leaving > 0 and index == self.part[-1]

    def _gather_backward(self, group: int) -> None:
        if group in self.compute and group not in self.gathered:
            self.gathered[group] = self.compute[group]
            self.note("gathering parameters for backward", self._copied_in(group))
        self.buffers.clear()

    def _prefetch(self, index: int) -> None:
        before = reversed(range(self.part[0], index))
        earlier = next((i for i in before if i in self.compute), None)
        if earlier is None or earlier in self.gathered or self.setting.dp == 1:
            return
        if self.live and self.gathered.total + self.compute[earlier] > self.live:
            return
        self.buffers[earlier] = self.compute[earlier]
        self.note("prefetching parameters", self._copied_in(earlier))

    def _reduce(self, group: int, reshards: bool, retained: int = 0) -> None:
        if reshards:
            self.gathered.let_go(group)
        self.reduce_input = size = self.reduced[group]
        self.note("reducing gradients")
        self.gradients.let_go(group)
        if group >= len(self.blocks):
            self.marks.clear()
        copy = size if self.is_gloo and self.zero > 0 else 0
        shard = (
            -(-self.whole[group] // self.setting.dp_shard) if self.zero > 0 else self.whole[group]
        )
        self.note("reducing gradients", shard + copy + retained)
        self.sharded[group] = 0 if self.is_offloaded else shard
